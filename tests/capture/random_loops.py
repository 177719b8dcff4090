"""Training loops that are drawn, in two equal worlds: one captures its steps, the other does not.

Nets have state: buffers, counters, settings in objects. Anything may change between steps, and some
steps fail. Both worlds draw the same, so everything must be equal after each step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import backpack_core.extensions as known
from backpack_capture import capture
from backpack_core import backpack, extend

Change = Callable[["World", Random], None]
CHANGES: dict[str, Change] = {}
EXTENSIONS = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "KFLR")
GLOBAL = {"factor": 1.0}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


# Nets with state ---------------------------------------------------------------------------------


class Part(nn.Module):
    """A layer, and everything that the functions below look at."""

    def __init__(self, size: int, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(size, size), nn.Linear(size, size), function
        self.k, self.is_on, self.calls = 1.0, True, 0
        self.settings = SimpleNamespace(inner=SimpleNamespace(k=1.0), listed=[1.0, (2.0, 3.0)])
        self.array, self.pair = np.ones(size), (torch.ones(size), torch.ones(1))
        self.kept: Tensor | None = None
        self.log: list[float] = []
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    @property
    def doubled(self) -> float:
        return 2 * self.settings.inner.k


def _ema(part: Any, x: Tensor) -> Tensor:
    if part.training:
        with torch.no_grad():
            part.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            part.count += 1
    return part.a(x).tanh() - part.mean  # type: ignore[no-any-return]


def _counted(part: Any, x: Tensor) -> Tensor:
    part.calls += 1
    return part.a(x) * (1.0 + part.calls % 2)  # type: ignore[no-any-return]


def _weighted(part: Any, x: Tensor) -> Tensor:
    part.count.add_(1)
    return part.a(x) / (1 + part.count)  # type: ignore[no-any-return]


def _branches(part: Any, x: Tensor) -> Tensor:
    return part.a(x) if x.sum() > 0 else part.b(x).tanh()


def _toggled(part: Any, x: Tensor) -> Tensor:
    part.b.requires_grad_(part.is_on)
    return part.a(x) + part.b(x)  # type: ignore[no-any-return]


def _edited(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.a.weight.mul_(0.99)
    return part.a(x).sigmoid()  # type: ignore[no-any-return]


def _detached(part: Any, x: Tensor) -> Tensor:
    h = part.a(x)
    if not part.is_on:
        h = (h * 1.0).detach_()
    return h + part.b(x)  # type: ignore[no-any-return]


def _remembering(part: Any, x: Tensor) -> Tensor:
    h = part.a(x).tanh()
    if part.kept is not None and part.kept.shape == h.shape:
        h = h + 0.1 * part.kept
    part.kept = h.detach()
    return h  # type: ignore[no-any-return]


def _logging(part: Any, x: Tensor) -> Tensor:
    part.log.append(1.0)
    return part.a(x) * (1.0 + len(part.log) % 3)  # type: ignore[no-any-return]


def _numbers(part: Any, x: Tensor) -> Tensor:
    return part.a(x) * torch.as_tensor(part.array, dtype=x.dtype)  # type: ignore[no-any-return]


def _from_list(part: Any, x: Tensor) -> Tensor:
    factors = torch.tensor([part.k, *part.settings.listed[1]])
    return part.a(x) * factors.sum()  # type: ignore[no-any-return]


def _in_dictionary(part: Any, x: Tensor) -> Tensor:
    found = {"h": part.a(x), "more": {"gate": part.b(x).sigmoid()}}
    return found["h"] * found["more"]["gate"]  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda p, x: p.a(x).tanh(),
    "mean": _ema,
    "counted": _counted,
    "weighted": _weighted,
    "branches": _branches,
    "toggled": _toggled,
    "edited": _edited,
    "detached": _detached,
    "remembering": _remembering,
    "logging": _logging,
    "numbers": _numbers,
    "from a list": _from_list,
    "dictionary": _in_dictionary,
    "global": lambda p, x: p.a(x) * GLOBAL["factor"],
    "settings": lambda p, x: p.a(x) * p.settings.inner.k + p.settings.listed[0],
    "property": lambda p, x: p.a(x) * p.doubled,
    "pair": lambda p, x: p.a(x) * p.pair[0] + p.pair[1],
    "made": lambda p, x: p.a(x) + torch.ones(x.shape[-1]) * 0.1,
    "dropout": lambda p, x: nn.functional.dropout(p.a(x), 0.3, p.training),
    "noise": lambda p, x: p.a(x) + 0.1 * torch.randn_like(x),
    "read": lambda p, x: p.a(x) * (1.0 if float(x.detach().abs().max()) > 1.5 else 2.0),
    "mode": lambda p, x: p.a(x) if torch.is_autocast_enabled("cpu") else p.b(x),
}


# A world -----------------------------------------------------------------------------------------


class World:
    """Models, losses, an optimizer, and the steps that are made."""

    def __init__(self, random: Random, is_captured: bool) -> None:
        self.is_captured, self.told = is_captured, list[Any]()
        self.size, self.samples, self.beta, self.fails = 4, 3, 0.5, False
        names = [random.choice([*FUNCTIONS]) for _ in range(random.randint(1, 2))]
        self.told.append(names)
        parts = [Part(self.size, FUNCTIONS[name]) for name in names]
        self.net: Any = extend(nn.Sequential(*parts, nn.Linear(self.size, 3)))
        self.second: Any = extend(
            nn.Sequential(nn.Linear(self.size, 4), nn.ReLU(), nn.Linear(4, 1))
        )
        self.lossfunc, self.other = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
        self.names = random.sample(EXTENSIONS, random.randint(0, 2))
        self.has_hook = random.random() < 0.2
        self.gradient: Any = random.choice(["autograd", "autograd", "skipped", "none"])
        self.kind = random.choice([*STEPS])
        self.told += [self.names, self.kind, self.gradient, self.has_hook]
        self.make_optimizer(random)
        self.steps: dict[str, Any] = {}
        self.modes: list[str] = []
        self.keeps = False
        self.handles: list[Any] = []

    def make_optimizer(self, random: Random) -> None:
        parameters = [*self.net.parameters(), *self.second.parameters()]
        make: Any = random.choice([
            lambda: torch.optim.SGD(parameters, 0.05, momentum=0.9),
            lambda: torch.optim.Adam(parameters, 0.01),
            lambda: torch.optim.SGD(parameters, 0.05, foreach=True),
        ])  # fmt: skip
        self.optimizer = make()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)

    def modules(self) -> list[nn.Module]:
        return [self.net, self.second, self.lossfunc, self.other]

    def parts(self) -> list[Any]:
        return [module for module in self.net if isinstance(module, Part)]

    def parameter(self, random: Random) -> nn.Parameter:
        return random.choice([*self.net.parameters()])

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(self.samples, self.size), torch.randint(3, (self.samples,))

    # Steps ---------------------------------------------------------------------------------------

    def step(self, name: str, x: Tensor, y: Tensor) -> Any:
        function = STEPS[name]
        if not self.is_captured:
            made = [getattr(known, kind)() for kind in self.names]
            found = function(self, x, y)
            hook = _hook if self.has_hook else None
            with backpack(*made, gradient=self.gradient, extension_hook=hook):
                (found[0] if isinstance(found, tuple) else found).backward()
            return found
        if name not in self.steps:
            made = [getattr(known, kind)() for kind in self.names]
            options: dict[str, Any] = {"gradient": self.gradient}
            if self.has_hook:
                options |= {"extension_hook": _hook, "hook_only_computes": True}
            bound = lambda x, y: function(self, x, y)  # noqa: E731
            self.steps[name] = capture(bound, *self.modules(), *made, **options)
        return self.steps[name](x, y)

    def go_on(self, name: str, seed: int) -> dict[str, Any]:
        """One step; returns everything that can be seen afterwards."""
        torch.manual_seed(seed)
        for parameter in (*self.net.parameters(), *self.second.parameters()):
            for field in ("norms", *(getattr(known, kind).savefield for kind in self.names)):
                parameter.__dict__.pop(field, None)
        x, y = self.data()
        if not self.keeps:
            self.optimizer.zero_grad()
        found: dict[str, Any] = {}
        try:
            with self.in_modes():
                found["returned"] = _shown(self.step(name, x, y))
        except Exception as error:
            found["error"] = type(error).__name__
        found["generator"] = torch.get_rng_state()
        for role, module in (("net", self.net), ("second", self.second)):
            for path, parameter in module.named_parameters():
                found[f"{role} {path}"] = parameter.detach().clone()
                found[f"{role} {path} grad"] = _shown(parameter.grad)
                for key, value in vars(parameter).items():
                    if not key.startswith("_"):
                        found[f"{role} {path} {key}"] = _shown(value)
            for path, buffer in module.named_buffers():
                found[f"{role} {path}"] = buffer.clone()
        found["parts"] = [(part.calls, len(part.log)) for part in self.parts()]
        if "error" not in found and self.gradient == "autograd":
            self.optimizer.step()
        return found

    @contextlib.contextmanager
    def in_modes(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            if "autocast" in self.modes:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if "no_grad" in self.modes:
                stack.enter_context(torch.no_grad())
            if "nested" in self.modes:
                stack.enter_context(backpack(known.BatchGrad(savefield="outer")))
            if "single" in self.modes:
                torch.set_default_dtype(torch.float32)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


def _hook(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        if hasattr(parameter, "grad_batch"):
            parameter.norms = parameter.grad_batch.flatten(1).norm(dim=1)  # type: ignore[attr-defined]


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    return value


# What a step computes ----------------------------------------------------------------------------


def _simple(world: World, x: Tensor, y: Tensor) -> Any:
    loss = world.lossfunc(world.net(x), y)
    if world.fails:
        raise ZeroDivisionError
    return loss


def _returning(world: World, x: Tensor, y: Tensor) -> Any:
    output = world.net(x)
    return world.lossfunc(output, y), {"output": output, "best": [output.argmax(1)]}


def _twofold(world: World, x: Tensor, y: Tensor) -> Any:
    first = world.lossfunc(world.net(x), y)
    return first + world.beta * world.other(world.second(x), y.to(x.dtype).unsqueeze(1))


def _one_of_two(world: World, x: Tensor, y: Tensor) -> Any:
    if world.beta > 0.5:
        return world.lossfunc(world.net(x), y)
    return world.other(world.second(x), y.to(x.dtype).unsqueeze(1))


def _penalised(world: World, x: Tensor, y: Tensor) -> Any:
    penalty = sum(p.square().sum() for p in world.net.parameters() if p.requires_grad)
    return world.lossfunc(world.net(x), y) + 1e-3 * world.beta * penalty


STEPS: dict[str, Callable[[World, Tensor, Tensor], Any]] = {
    "simple": _simple,
    "returning": _returning,
    "twofold": _twofold,
    "one of two": _one_of_two,
    "penalised": _penalised,
}


# What changes ------------------------------------------------------------------------------------


@change
def samples(world: World, random: Random) -> None:
    world.samples = random.choice([1, 2, 3, 5])


@change
def setting(world: World, random: Random) -> None:
    for part in world.parts():
        part.k = random.choice([1.0, 2.0])
        part.is_on = random.random() < 0.5


@change
def inner_setting(world: World, random: Random) -> None:
    for part in world.parts():
        part.settings.inner.k = random.choice([1.0, 3.0])
        part.settings.listed[0] = random.choice([1.0, 0.5])


@change
def whole_setting(world: World, random: Random) -> None:
    for part in world.parts():
        part.settings = copy.deepcopy(part.settings)
        part.settings.listed[1] = (random.random(), 1.0)


@change
def array(world: World, random: Random) -> None:
    for part in world.parts():
        part.array[0] = random.choice([1.0, 2.0])


@change
def other_array(world: World, random: Random) -> None:
    for part in world.parts():
        part.array = np.full(world.size, random.choice([1.0, 2.0]))


@change
def pair(world: World, random: Random) -> None:
    for part in world.parts():
        part.pair[0].mul_(random.choice([0.5, 2.0]))
        part.pair = (part.pair[0], torch.full((1,), random.random()))


@change
def a_global(world: World, random: Random) -> None:
    world.shared = random.choice([1.0, 2.0])  # type: ignore[attr-defined]


@change
def buffers(world: World, random: Random) -> None:
    for part in world.parts():
        part.mean = part.mean + 0.1
        part.get_buffer("count").fill_(random.randrange(5))


@change
def beta(world: World, random: Random) -> None:
    world.beta = random.choice([0.2, 0.5, 0.7])


@change
def mode(world: World, random: Random) -> None:
    world.net.train(random.random() < 0.5)


@change
def failing(world: World, random: Random) -> None:
    world.fails = not world.fails


@change
def torch_modes(world: World, random: Random) -> None:
    world.modes = random.sample(["autocast", "single", "nested", "no_grad"], random.randint(0, 1))


@change
def schedule(world: World, random: Random) -> None:
    world.optimizer.step()
    world.scheduler.step()


@change
def gradients_stay(world: World, random: Random) -> None:
    world.keeps = not world.keeps


@change
def freeze(world: World, random: Random) -> None:
    parameter = world.parameter(random)
    parameter.requires_grad_(not parameter.requires_grad)
    [*world.net.parameters()][-1].requires_grad_(True)


@change
def data_of_parameter(world: World, random: Random) -> None:
    parameter = world.parameter(random)
    parameter.data = parameter.data.clone() * 0.9


@change
def replaced_parameter(world: World, random: Random) -> None:
    part = random.choice(world.parts())
    part.a.weight = nn.Parameter(part.a.weight.detach() * 0.9)


@change
def tied(world: World, random: Random) -> None:
    part = random.choice(world.parts())
    part.b.weight = part.a.weight


@change
def loaded(world: World, random: Random) -> None:
    state = {name: value * 0.95 for name, value in world.net.state_dict().items()}
    state = {n: v.to(world.net.state_dict()[n].dtype) for n, v in state.items()}
    world.net.load_state_dict(state, assign=random.random() < 0.3)


@change
def replaced_model(world: World, random: Random) -> None:
    world.net = copy.deepcopy(world.net)


@change
def other_function(world: World, random: Random) -> None:
    part = random.choice(world.parts())
    part.function = FUNCTIONS[random.choice([*FUNCTIONS])]


@change
def gradient_hook(world: World, random: Random) -> None:
    if world.handles:
        world.handles.pop().remove()
        return
    parameter, factor = world.parameter(random), random.choice([None, 0.5])
    if parameter.requires_grad:
        hook = lambda grad: None if factor is None else grad * factor  # noqa: E731
        world.handles.append(parameter.register_hook(hook))


@change
def another_step(world: World, random: Random) -> None:
    world.kind = random.choice([*STEPS])


@change
def plain_pass(world: World, random: Random) -> None:
    """Another pass over the same model, outside of a step."""
    x, y = world.data()
    with contextlib.suppress(Exception), backpack(known.SumGradSquared(savefield="aside")):
        world.lossfunc(world.net(x), y).backward()


@change
def extended_again(world: World, random: Random) -> None:
    extend(world.net)
