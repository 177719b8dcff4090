"""Modules as users write them: with parameters, children, several outputs, and odd signatures."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nets.kinds import Run, Shapes, module, need, on_axes
from tests.nets.recipe import Settings


class Scale(nn.Module):
    """A gain for every feature, and an offset."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Dense(nn.Module):
    """A linear layer with its activation, by functions."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))


class Gated(nn.Module):
    """A parameter of its own around a child."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + torch.sigmoid(self.gate) * self.child(F.silu(x))
        return result


class Stages(nn.Module):
    """Two outputs, one made from the other, with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * self.weight
        return h.tanh(), h


class GatedStages(nn.Module):
    """The same behind a child."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.child(x)
        return h, h * self.weight


class Twice(nn.Module):
    """A child that is called twice, beside a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)
        self.offset = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.child(torch.sin(self.child(x)) + self.offset)
        return result


class Positions(nn.Module):
    """A table of positions that is added to a sequence."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(1, *shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class ClassToken(nn.Module):
    """A token in front of a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1)


class Actor(nn.Module):
    """A mean, and a spread that does not depend on the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean = nn.Linear(width, 2)
        self.log_std = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.log_std.expand_as(mean)


class Mapping(nn.Module):
    """A dictionary in, a dictionary out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        h = batch["x"] * self.weight
        return {"sum": h + batch["y"], "product": h * batch["y"]}


class Pair(nn.Module):
    """A tuple in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, width))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * self.weight[0] + torch.cos(pair[1] * self.weight[1])


class Keywords(nn.Module):
    """Keyword arguments, one of them in no order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)

    def forward(self, x: Tensor, *, gate: Tensor, power: float = 1.0) -> Tensor:
        result: Tensor = self.child(input=x) * torch.sigmoid(gate) * power
        return result


class Rewriting(nn.Module):
    """Parameters, and a forward pass that writes into what it made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        h[:, :1] *= 2.0
        return h.relu_()


class Noisy(nn.Module):
    """Parameters behind functional dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.3)


class Tap(nn.Module):
    """Returns its input, and something beside it; no parameters."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tanh(x)


class Halves(nn.Module):
    """Two views as outputs; no parameters."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


class Turned(nn.Module):
    """Returns a view of what it computes, ``[N, T, C] → [N, C, T]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).transpose(1, 2)


class Tokens(nn.Module):
    """Images as sequences, ``[N, C, H, W] → [N, H W, C]``; no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


def _by_width(kind: type[nn.Module], weight: float, traits: str = "") -> None:
    module(kind.__name__, lambda s, shapes: kind(shapes[0][-1]), weight=weight, traits=traits)


for _kind in (Scale, Gated, Stages, GatedStages, Twice, Actor, Rewriting):
    _by_width(_kind, 1.0)
_by_width(Noisy, 0.4, "random")
module(
    "Dense",
    lambda s, shapes: Dense(shapes[0][-1], s["out"]),
    lambda random, shapes: {"out": random.randint(1, 4)},
    weight=1.5,
)
module("Positions", lambda s, shapes: Positions(*shapes[0]), weight=0.7)


def _draw_long(random: Random, shapes: Shapes) -> dict[str, Any]:
    need(shapes[0][0] > 1)
    return {}


module("ClassToken", lambda s, shapes: ClassToken(shapes[0][-1]), on_axes(2), weight=0.7)
module("Tap", lambda s, shapes: Tap())
module("Halves", lambda s, shapes: Halves(), _draw_long)
module("Tokens", lambda s, shapes: Tokens(), on_axes(3))
module("Turned", lambda s, shapes: Turned(shapes[0][-1]), on_axes(2))


def _run_mapping(part: nn.Module, settings: Settings, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return tuple(part({"x": x, "y": y}).values())


def _run_pair(part: nn.Module, settings: Settings, *pair: Tensor) -> Tensor:
    result: Tensor = part(pair)
    return result


def _run_keywords(part: nn.Module, settings: Settings, x: Tensor, gate: Tensor) -> Tensor:
    result: Tensor = part(gate=gate, power=2.0, x=x)
    return result


def _with_pair(kind: Callable[[int], nn.Module], name: str, run: Run) -> None:
    module(
        name, lambda s, shapes: kind(shapes[0][-1]), run=run, arity=2, traits="matching", weight=1.5
    )


_with_pair(Mapping, "Mapping", _run_mapping)
_with_pair(Pair, "Pair", _run_pair)
_with_pair(Keywords, "Keywords", _run_keywords)


def _run_of_net(part: nn.Parameter, settings: Settings, x: Tensor) -> Tensor:
    return x * part


module(
    "NetParameter",
    lambda s, shapes: nn.Parameter(torch.empty(shapes[0][-1])),
    run=_run_of_net,
    weight=0.3,
)
