"""Steps that hide to which sample a row belongs.

``"mixing"`` steps let samples influence each other: what belongs to a sample does not exist behind
them, so that only an error is right. ``"whole"`` steps need the other samples to be there, but
leave each its gradient. The others have an exact answer for every sample alone.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nets.kinds import Shapes, axes, divisor, function, module, need, on_axes
from tests.nets.own_functions import Silent
from tests.nets.own_modules import Dense, Gated, Scale
from tests.nets.recipe import Settings

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "centre": lambda x: x - x.mean(0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "similarity": lambda x: ((x.flatten(1) @ x.flatten(1).mT).softmax(1) @ x.flatten(1)).view_as(x),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True, eps=0.1),
    "cumulative": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "largest": lambda x: x - x.amax(0, keepdim=True),
    "norm": lambda x: x.div(1 + x.norm()),
    "mixup": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "previous": lambda x: x + 0.5 * x.roll(1, 0),
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "order": lambda x: x[torch.arange(len(x)).roll(1)],
    "detached_centre": lambda x: x - x.detach().mean(0),
}


def _named(table: dict[str, Any]) -> Callable[[Random, Shapes], dict[str, Any]]:
    return lambda random, shapes: {"name": random.choice(sorted(table))}


function("mix", lambda s, x: MIXING[s["name"]](x), _named(MIXING), weight=6, traits="trap mixing")
function("reorder", lambda s, x: WHOLE[s["name"]](x), _named(WHOLE), weight=2, traits="trap whole")


def _positions(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    """A table of positions, looked up once for all samples."""
    return x + part(torch.arange(x.shape[1]))


def _coordinates(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    """A net of coordinates."""
    return x * torch.tanh(part(torch.linspace(-1, 1, x.shape[1])[:, None]))


module(
    "PositionTable",
    lambda s, shapes: nn.Embedding(8, shapes[0][-1]),
    on_axes(2),
    _positions,
    weight=3,
    traits="trap",
)
module(
    "CoordinateNet",
    lambda s, shapes: nn.Linear(1, shapes[0][-1]),
    on_axes(2),
    _coordinates,
    weight=2,
    traits="trap",
)

ROW_WISE: dict[str, Callable[[int], nn.Module]] = {
    "Linear": lambda width: nn.Linear(width, width),
    "LayerNorm": nn.LayerNorm,
    "Dense": lambda width: Dense(width, width),
    "Scale": Scale,
    "Gated": Gated,
}
LONG: dict[str, Callable[[int], nn.Module]] = {
    "GRU": lambda width: nn.GRU(width, width, batch_first=False),
    "Attention": lambda width: nn.MultiheadAttention(width, 1, batch_first=False),
    "EncoderLayer": lambda width: nn.TransformerEncoderLayer(width, 1, 3, 0.0, batch_first=False),
}
WINDOWS: dict[str, Callable[[int], nn.Module]] = {
    "GRU": lambda width: nn.GRU(width, width, batch_first=True),
    "Attention": lambda width: nn.MultiheadAttention(width, 1, batch_first=True),
    "Linear": lambda width: nn.Linear(width, width),
    "LayerNorm": nn.LayerNorm,
}


def _applied(part: nn.Module, x: Tensor) -> Tensor:
    found = part(x, x, x) if isinstance(part, nn.MultiheadAttention) else part(x)
    result: Tensor = found[0] if isinstance(found, tuple) else found
    return result


def _any_of(*tables: dict[str, Callable[[int], nn.Module]]) -> dict[str, Any]:
    names = {name: make for table in tables for name, make in table.items()}

    def draw(random: Random, shapes: Shapes) -> dict[str, Any]:
        axes(shapes[0], 2)
        need(shapes[0][-1] > 2)
        return {"name": random.choice(sorted(names)), "strided": random.random() < 0.4}

    return {
        "make": lambda s, shapes: names[s["name"]](shapes[0][-1]),
        "draw": draw,
        "traits": "trap",
    }


def _time_first(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    return _applied(part, x.transpose(0, 1)).transpose(0, 1)


def _merged(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    """Positions become samples."""
    if settings["strided"]:
        y = x.transpose(0, 1)
        return _applied(part, y.flatten(0, 1)).view_as(y).transpose(0, 1)
    return _applied(part, x.flatten(0, 1)).view_as(x)


def _windows(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    """Pieces of a sequence become samples."""
    pieces = divisor(Random(0), x.shape[1]) if x.shape[1] % 2 else 2
    y = x.reshape(len(x) * pieces, x.shape[1] // pieces, x.shape[2])
    return _applied(part, y).reshape_as(x)


def _routed(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    """A mixture of experts: some positions of some samples, in one batch."""
    tokens = x.flatten(0, 1)
    chosen = (tokens.detach()[:, 0] > -0.3).nonzero()[:, 0]
    return (tokens + torch.zeros_like(tokens).index_add(0, chosen, part(tokens[chosen]))).view_as(x)


module("TimeFirst", run=_time_first, weight=4, **_any_of(ROW_WISE, LONG))
module("Merged", run=_merged, weight=3, **_any_of(ROW_WISE))
module("Windows", run=_windows, weight=4, **_any_of(WINDOWS))
module("Routed", run=_routed, weight=3, **_any_of(ROW_WISE))


class Table(nn.Module):
    """Parameters that others use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))


def _hypernetwork(part: nn.Module, x: Tensor) -> Tensor:
    weight = part(torch.eye(x.shape[-1]))
    return F.linear(x, weight)


OUTSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda part, x: F.linear(x, part.weight),
    "both": lambda part, x: part(x) + F.linear(torch.sin(x), part.weight),
    "transposed": lambda part, x: torch.tanh(part(x)) @ part.weight,
    "norm": lambda part, x: x * part.weight.norm(),
    "silent": lambda part, x: Silent.apply(part(x), part.weight),
    "row": lambda part, x: x + part.weight[0],
    "hypernetwork": _hypernetwork,
}


def _outside(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    return OUTSIDE[settings["name"]](part, x)


module(
    "Outside",
    lambda s, shapes: nn.Linear(shapes[0][-1], shapes[0][-1], bias=False),
    _named(OUTSIDE),
    _outside,
    weight=4,
    traits="trap",
)
module(
    "OutsideTable",
    lambda s, shapes: Table(shapes[0][-1]),
    lambda random, shapes: {"name": random.choice(["function", "norm", "row"])},
    _outside,
    weight=2,
    traits="trap",
)


def _hooked(settings: Settings, x: Tensor) -> Tensor:
    """A hook of the user's that changes the gradient."""
    if x.requires_grad:
        x.register_hook(lambda grad: 2 * grad)
    return x


function("hook", _hooked, weight=2, traits="trap hook")


module(
    "WeightNorm",
    lambda s, shapes: nn.utils.parametrizations.weight_norm(nn.Linear(shapes[0][-1], 3)),
    traits="trap",
)
