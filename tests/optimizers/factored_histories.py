"""Histories of KFAC and EKFAC against explicit matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_core import extend, unextend
from backpack_optimizers import EKFAC, KFAC, LevenbergMarquardt
from tests.drawn import Fault, check_refused
from tests.optimizers.histories import (
    CLASSES,
    IN,
    Found,
    Net,
    Plain,
    as_one,
    diverged,
    look,
    near,
    param_groups,
)

STEPS = 12
HAPPENINGS: dict[str, Callable[[History], None]] = {}


def happening(function: Callable[[History], None]) -> Any:
    HAPPENINGS[function.__name__] = function
    return function


@happening
def other_settings(history: History) -> None:
    number = history.random.randrange(len(history.plain.groups))
    name, value = history.random.choice(
        [("lr", 0.02), ("lr", 0.2), ("weight_decay", 0.2), ("momentum", 0.0), ("momentum", 0.5)]
    )
    history.plain.groups[number][name] = history.optimizer.param_groups[number][name] = value


@happening
def other_damping(history: History) -> None:
    history.plain.damping = history.optimizer.damping = history.random.choice([0.05, 0.4, 1.0])


@happening
def other_method(history: History) -> None:
    number = history.random.randrange(len(history.plain.groups))
    method = history.random.choice(["adam", "curvature"])
    history.plain.groups[number]["method"] = method
    history.optimizer.param_groups[number]["method"] = method


@happening
def frozen(history: History) -> None:
    name, parameter = history.random.choice([*history.model.named_parameters()])
    is_trained = not parameter.requires_grad
    for model in (history.model, history.plain.model):
        model.get_parameter(name).requires_grad_(is_trained)
    if not any(p.requires_grad for p in history.model.last.parameters()):
        for model in (history.model, history.plain.model):
            model.last.requires_grad_(True)


@happening
def another_group(history: History) -> None:
    if history.left:
        history.plain.groups.append({**history.settings, "names": history.left})
        history.optimizer.add_param_group(
            {"params": [history.model.get_parameter(n) for n in history.left]}
        )
        history.left = []


@happening
def saved_and_loaded(history: History) -> None:
    states = copy.deepcopy([history.model.state_dict(), history.optimizer.state_dict()])
    if history.random.random() < 0.5:
        model = unextend(copy.deepcopy(history.model))
        model.zero_grad()
        history.plain.gradients = {}
        history.model = extend(model)
    history.make()
    history.model.load_state_dict(states[0])
    history.optimizer.load_state_dict(states[1])


@happening
def forgotten_pass(history: History) -> None:
    """A pass without a step, and gradients that are set to zero in some way."""
    x, y = history.data()
    with history.optimizer.curvature():
        history.lossfunc(history.model(x), y).backward()
    history.zero_grad()


@happening
def failing_pass(history: History) -> None:
    x, y = history.data()
    with suppress(ZeroDivisionError), history.optimizer.curvature():
        history.lossfunc(history.model(x), y).backward()
        raise ZeroDivisionError
    history.zero_grad()


@happening
def not_finite(history: History) -> None:
    if history.plain.steps % history.options["factors_every"]:
        return
    weight = history.model.first.weight
    if not weight.requires_grad or weight not in {*history.optimizer._all("curvature")}:
        return
    x, y = history.data()
    with history.optimizer.curvature():
        history.lossfunc(history.model(x * torch.nan), y).backward()
    if not history.options["adapt"]:  # otherwise a step needs a closure
        check_refused(history.optimizer.step)
    history.zero_grad("optimizer")


@happening
def step_without_pass(history: History) -> None:
    if history.plain.steps % history.options["factors_every"] == 0:
        history.zero_grad("optimizer")
        check_refused(history.optimizer.step)


@happening
def other_mode(history: History) -> None:
    history.model.train(history.random.random() < 0.5)


@happening
def no_zeros(history: History) -> None:
    history.keeps_gradients = True


@happening
def copied(history: History) -> None:
    check_refused(lambda: copy.deepcopy(history.optimizer))


class History:
    """An optimizer and its reference."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.random, self.told = Random(seed), list[Any]()
        random = self.random
        plain = Net(random)
        self.model = extend(copy.deepcopy(plain))
        self.kind: Any = random.choice([KFAC, EKFAC])
        reduction = random.choice(["mean", "sum"])
        self.plain_loss = random.choice([nn.CrossEntropyLoss, nn.MSELoss])(reduction=reduction)
        self.lossfunc = extend(copy.deepcopy(self.plain_loss))
        self.options: dict[str, Any] = {
            "factor_decay": random.choice([0.6, 0.95]),
            "factors_every": random.choice([1, 1, 2]),
            "inverses_every": random.choice([1, 3, 4]),
            "kl_clip": random.choice([None, 1e-2]),
            "adapt": random.choice([None, None, LevenbergMarquardt(2, 0.5)]),
        }
        if self.kind is KFAC:
            self.options["split"] = random.choice(["pi", "equal", "exact"])
        self.settings: dict[str, Any] = {
            "lr": 0.1,
            "weight_decay": random.choice([0.0, 0.1]),
            "momentum": random.choice([0.0, 0.9]),
            "method": "curvature",
            "adam_scale": 0.1,
            "adam_eps": 1e-2,
        }
        names = [n for n, _ in plain.named_parameters()]
        groups = [{**self.settings, "names": names}]
        self.left: list[str] = []
        if random.random() < 0.6:
            groups = [{**self.settings, "names": part} for part in (names[:2], names[2:])]
            groups[1]["method"] = random.choice(["adam", "curvature"])
            groups[1]["lr"] = 0.05
        if random.random() < 0.3 and len(groups) == 2:
            self.left = groups.pop()["names"]
        self.plain = Plain(plain, groups, self.options, self.kind is EKFAC, self._basis_of)
        self.keeps_gradients = False
        self.make()

    def make(self) -> None:
        self.optimizer = self.kind(
            *(self.model, param_groups(self.model, self.plain.groups)),
            **{"damping": self.plain.damping, "mc_samples": None, **self.options, **self.settings},
        )
        self._captured: Any = None

    def _basis_of(self, name: str) -> Tensor:
        vectors = self.optimizer._bases[self.model.get_parameter(name)].vectors
        found: Tensor = torch.kron(*vectors) if len(vectors) == 2 else vectors[0]
        return found

    def data(self) -> tuple[Tensor, Tensor]:
        count = self.random.randint(1, 5)
        of_classes = isinstance(self.lossfunc, nn.CrossEntropyLoss)
        y = torch.randint(CLASSES, (count,)) if of_classes else torch.randn(count, CLASSES)
        self.model.k = self.plain.model.k = self.random.choice([1, 1, 2])
        return torch.randn(count, IN), y

    def zero_grad(self, whose: str | None = None) -> None:
        to_none = self.random.random() < 0.7
        if (whose or self.random.choice(["model", "optimizer"])) == "model":
            self.model.zero_grad(to_none)
        else:
            self.optimizer.zero_grad(to_none)
            if self.left or not to_none:
                self.model.zero_grad(to_none)
        zeros = {
            n: torch.zeros_like(p) for n, p in self.model.named_parameters() if p.grad is not None
        }
        self.plain.gradients = zeros

    def go(self) -> None:
        while self.plain.steps < STEPS and not diverged(self.plain.model):
            while self.random.random() < 0.4:
                name = self.random.choice([*HAPPENINGS])
                self.told.append(name)
                HAPPENINGS[name](self)
            if self.options["adapt"]:
                self.step_with_closure()
            else:
                self.step()
            self.told.append(self.plain.steps)
            self.compare()

    def look(self, x: Tensor, y: Tensor) -> dict[str, Found]:
        return look(self.plain.model, self.plain_loss, x, y)

    def add(self, found: dict[str, Found]) -> None:
        """Add to the gradients that are there."""
        known = self.plain.gradients
        for name, one in found.items():
            known[name] = known[name] + one.gradient if name in known else one.gradient

    def step(self) -> None:
        if not self.keeps_gradients:
            self.zero_grad()
        self.keeps_gradients = False
        is_due = self.plain.steps % self.options["factors_every"] == 0
        is_mean = self.plain_loss.reduction == "mean"
        if not is_due and self.random.random() < 0.3:
            x, y = self.data()
            self.lossfunc(self.model(x), y).backward()
            self.add(self.look(x, y))
            self.optimizer.step()
            self.plain.step({})
            return
        if self.random.random() < 0.15:
            if self.optimizer._joined.passes:  # the model's zero_grad() is seen by the next pass
                self.zero_grad("optimizer")
            self.foreign()
        passes = []
        count = self.random.choice([1, 1, 2, 3])
        scale = self.random.choice([1.0, 1.0, 8.0])
        if self.plain.gradients:  # these have another scale
            scale = 1.0
        for number in range(count):
            x, y = self.data()
            if number and self.random.random() < 0.1:
                versions = self.versions()
                self.foreign(scale=scale)
                if is_mean and any(self.versions()[n] != v for n, v in versions.items()):
                    check_refused(lambda: self.pass_over(*self.data(), 1.0))
                    self.zero_grad("optimizer")
                    return
            self.pass_over(x, y, scale)
            passes.append((self.look(x, y), len(x)))
        found = as_one(passes, is_mean)
        self.add(found)
        if self.random.random() < 0.15:
            self.foreign(scale=scale)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        self.optimizer.step()
        self.plain.step(found)

    def versions(self) -> dict[str, int]:
        """Of the gradients that the optimizer has."""
        names = [n for g in self.plain.groups for n in g["names"]]
        grads = ((n, self.model.get_parameter(n).grad) for n in names)
        return {n: grad._version for n, grad in grads if grad is not None}

    def foreign(self, scale: float = 1.0) -> None:
        """A backward pass outside of any block."""
        self.told.append("foreign")
        x, y = self.data()
        (scale * self.lossfunc(self.model(x), y)).backward()
        self.add(self.look(x, y))

    def pass_over(self, x: Tensor, y: Tensor, scale: float) -> None:
        if scale == 1.0 and self.random.random() < 0.3:
            if self._captured is None:
                function = lambda x, y: self.lossfunc(self.model(x), y)  # noqa: E731
                self._captured = capture(function, self.lossfunc, self.optimizer)
            self._captured(x, y)
            return
        with self.optimizer.curvature(scale):
            (scale * self.lossfunc(self.model(x), y)).backward()

    def step_with_closure(self) -> None:
        x, y = self.data()
        self.optimizer._block = self.optimizer.curvature

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            value: Tensor = self.lossfunc(self.model(x), y)
            value.backward()
            return value

        plain, adapt = self.plain, self.options["adapt"]
        found = self.look(x, y)
        plain.gradients = {}
        self.model.zero_grad()
        self.add(found)
        before = {n: p.detach().clone() for n, p in plain.model.named_parameters()}
        loss = float(self.plain_loss(plain.model(x), y))
        self.optimizer.step(closure)
        plain.step(found)
        if plain.steps % adapt.every:
            return
        predicted = 0.0
        stepped = {n for g in plain.groups for n in g["names"]}
        for name in stepped & {*plain.gradients}:
            step = plain.model.get_parameter(name).detach() - before[name]
            curved = plain.times(name, step) + plain.damping * step
            predicted += float(((plain.gradients[name] + 0.5 * curved) * step).sum())
        change = float(self.plain_loss(plain.model(x), y)) - loss
        plain.damping = adapt(plain.damping, change, predicted)

    def compare(self) -> None:
        near(self.model, self.plain.model, 1e-9)
        if self.optimizer.damping != self.plain.damping:
            raise Fault(f"damping {self.optimizer.damping}, not {self.plain.damping}")
        adams = {n for g in self.plain.groups if g["method"] == "adam" for n in g["names"]}
        adams = {n for n in self.plain.moments if n in adams or n not in self.plain.known}
        if {*self.optimizer.without_factors} != adams:
            raise Fault(f"{self.optimizer.without_factors} without factors, not {adams}")
