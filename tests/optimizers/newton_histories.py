"""Histories of GaussNewton against the whole matrix, formed by autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from backpack_optimizers import GaussNewton, LevenbergMarquardt
from tests.drawn import Fault, check_refused
from tests.optimizers.histories import (
    CLASSES,
    IN,
    Net,
    adam,
    diverged,
    loss_hessians,
    near,
    param_groups,
)

STEPS = 6
HAPPENINGS: dict[str, Callable[[NewtonHistory], None]] = {}


def happening(function: Callable[[NewtonHistory], None]) -> Any:
    HAPPENINGS[function.__name__] = function
    return function


@happening
def other_settings(history: NewtonHistory) -> None:
    number = history.random.randrange(len(history.groups))
    name, value = history.random.choice(
        [("lr", 0.5), ("lr", 1.0), ("lr", 8.0), ("weight_decay", 0.2), ("weight_decay", 0.0)]
    )
    if value > 1 and not history.options["halvings"]:
        return  # training would diverge
    history.groups[number][name] = history.optimizer.param_groups[number][name] = value


@happening
def other_damping(history: NewtonHistory) -> None:
    history.damping = history.optimizer.damping = history.random.choice([0.05, 0.4, 1.0])


@happening
def other_method(history: NewtonHistory) -> None:
    number = history.random.randrange(len(history.groups))
    method = history.random.choice(["adam", "curvature"])
    history.groups[number]["method"] = method
    history.optimizer.param_groups[number]["method"] = method


@happening
def frozen(history: NewtonHistory) -> None:
    name, parameter = history.random.choice([*history.model.named_parameters()])
    is_trained = not parameter.requires_grad
    for model in (history.model, history.plain):
        model.get_parameter(name).requires_grad_(is_trained)


@happening
def another_group(history: NewtonHistory) -> None:
    if history.left:
        history.groups.append({**history.settings, "names": history.left})
        params = [history.model.get_parameter(n) for n in history.left]
        history.optimizer.add_param_group({"params": params})
        history.left = []


@happening
def saved_and_loaded(history: NewtonHistory) -> None:
    states = copy.deepcopy([history.model.state_dict(), history.optimizer.state_dict()])
    if history.random.random() < 0.5:
        history.model = copy.deepcopy(history.model)
    history.make()
    history.model.load_state_dict(states[0])
    history.optimizer.load_state_dict(states[1])


@happening
def refused(history: NewtonHistory) -> None:
    (x, y), *_ = history.data()
    check_refused(lambda: history.optimizer.step(lambda: None))
    check_refused(lambda: history.optimizer.step([]))
    check_refused(lambda: history.optimizer.step([(x * torch.nan, y)]))


@happening
def own_backward(history: NewtonHistory) -> None:
    (x, y), *_ = history.data()
    value = history.lossfunc(history.model(x), y)
    if value.requires_grad:
        value.backward()


@happening
def copied(history: NewtonHistory) -> None:
    check_refused(lambda: copy.deepcopy(history.optimizer))


class NewtonHistory:
    """An optimizer, and a plain copy of its net."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.random, self.told = Random(seed), list[Any]()
        random = self.random
        self.plain = Net(random)
        self.model = copy.deepcopy(self.plain)
        reduction = random.choice(["mean", "sum"])
        self.lossfunc = random.choice([nn.CrossEntropyLoss, nn.MSELoss])(reduction=reduction)
        self.options: dict[str, Any] = {
            "adapt": random.choice([None, LevenbergMarquardt(1, 0.5), LevenbergMarquardt(2, 0.5)]),
            "halvings": random.choice([0, 1, 10]),
            "warm_start": random.choice([0.0, 0.9]),
        }
        self.settings: dict[str, Any] = {
            "lr": random.choice([1.0, 4.0 if self.options["halvings"] else 0.5]),
            "weight_decay": random.choice([0.0, 0.1]),
            "method": "curvature",
            "adam_scale": 0.1,
            "adam_eps": 1e-2,
        }
        names = [n for n, _ in self.plain.named_parameters()]
        self.groups = [{**self.settings, "names": names}]
        self.left: list[str] = []
        if random.random() < 0.6:
            self.groups = [{**self.settings, "names": part} for part in (names[:2], names[2:])]
            self.groups[1]["method"] = random.choice(["adam", "curvature"])
            self.groups[1]["lr"] = 0.5
            if random.random() < 0.4:
                self.left = self.groups.pop()["names"]
        self.damping, self.steps = 0.1, 0
        self.moments: dict[str, Any] = {}
        self.make()

    def make(self) -> None:
        self.optimizer = GaussNewton(
            *(self.model, self.lossfunc, param_groups(self.model, self.groups)),
            **{"damping": self.damping, "rtol": 1e-13, "max_iterations": 300},
            **{**self.options, **self.settings},
        )

    def data(self) -> list[tuple[Tensor, Tensor]]:
        of_classes = isinstance(self.lossfunc, nn.CrossEntropyLoss)
        self.model.k = self.plain.k = self.random.choice([1, 1, 2])
        found = []
        for _ in range(self.random.choice([1, 1, 2, 3])):
            count = self.random.randint(1, 5)
            y = torch.randint(CLASSES, (count,)) if of_classes else torch.randn(count, CLASSES)
            found.append((torch.randn(count, IN), y))
        return found

    def go(self) -> None:
        while self.steps < STEPS and not diverged(self.plain):
            while self.random.random() < 0.5:
                name = self.random.choice([*HAPPENINGS])
                self.told.append(name)
                HAPPENINGS[name](self)
            batches = self.data()
            if not self.names("curvature"):
                check_refused(lambda: self.optimizer.step(batches))  # noqa: B023
                self.plain.requires_grad_(True)
                self.model.requires_grad_(True)
                for group, ours in zip(self.groups, self.optimizer.param_groups, strict=True):
                    group["method"] = ours["method"] = "curvature"
            loss = self.optimizer.step(batches)
            wanted = self.step(*(torch.cat(part) for part in zip(*batches, strict=True)))
            self.told.append(self.steps)
            self.compare(loss, wanted)

    def names(self, method: str) -> list[str]:
        """Of the trained parameters."""
        names = [n for g in self.groups for n in g["names"] if g["method"] == method]
        return [n for n in names if self.plain.get_parameter(n).requires_grad]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; the loss before it."""
        out = self.plain(x)
        loss = self.lossfunc(out, y)
        options: Any = {"retain_graph": True, "materialize_grads": True}
        chosen, others = self.names("curvature"), self.names("adam")
        named = {n: self.plain.get_parameter(n) for n in [*chosen, *others]}
        gradients = dict(
            zip(named, torch.autograd.grad(loss, [*named.values()], **options), strict=True)
        )
        rows = [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(one, [named[n] for n in chosen], **options)
                ]
            )
            for one in out.flatten()
        ]
        jacobian = torch.stack(rows).view(len(x), CLASSES, -1)
        hessians = loss_hessians(self.lossfunc, out.detach())
        matrix = torch.einsum("nci,ncd,ndj->ij", jacobian, hessians, jacobian)
        gradient = torch.cat([gradients[n].flatten() for n in chosen])
        damped = matrix + self.damping * torch.eye(len(matrix))
        group_of = {n: g for g in self.groups for n in g["names"]}
        rates = torch.cat([torch.full((named[n].numel(),), group_of[n]["lr"]) for n in chosen])
        step = -rates * torch.linalg.solve(damped, gradient)
        with torch.no_grad():
            self._search(x, y, float(loss), {n: named[n] for n in chosen}, step, group_of)
            if self._adapts():
                predicted = float(gradient @ step + 0.5 * step @ damped @ step)
                self.damping = self.options["adapt"](self.damping, self.change, predicted)
            for name in others:
                group = group_of[name]
                named[name].mul_(1 - group["lr"] * group["weight_decay"])
                adam(group, self.moments, name, named[name], gradients[name])
        self.steps += 1
        return loss.detach()

    def _adapts(self) -> bool:
        adapt = self.options["adapt"]
        return adapt is not None and (self.steps + 1) % adapt.every == 0

    def _search(
        self, x: Tensor, y: Tensor, loss: float, named: Any, step: Tensor, group_of: Any
    ) -> None:
        before = {n: p.clone() for n, p in named.items()}
        parts = step.split([p.numel() for p in named.values()])
        halvings = self.options["halvings"]
        for halving in range(halvings + 1):
            for (name, p), part in zip(named.items(), parts, strict=True):
                p.copy_(before[name] + 0.5**halving * part.view_as(p))
            change = float(self.lossfunc(self.plain(x), y)) - loss
            self.change = change if not halving else self.change
            if change <= 0 or not halvings:
                for name, p in named.items():  # as in AdamW: a share of the weights before
                    group = group_of[name]
                    p.sub_(group["lr"] * group["weight_decay"] * before[name])
                return
        for name, p in named.items():
            p.copy_(before[name])

    def compare(self, loss: Tensor, wanted: Tensor) -> None:
        if abs(float(loss - wanted)) > 1e-8 * (1 + abs(float(wanted))):
            raise Fault(f"loss {float(loss)}, not {float(wanted)}")
        near(self.model, self.plain, 1e-8)
        if self.optimizer.damping != self.damping:
            raise Fault(f"damping {self.optimizer.damping}, not {self.damping}")
