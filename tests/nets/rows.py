"""Rows of samples one by one: loops with a state, and rows that are written among constants."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nets.kinds import Shapes, axes, function, module
from tests.nets.recipe import Settings

# The next state, after the last one, a layer and the row of one sample. A state that meets the row
# before any layer goes unnoticed (docs/checks.md).
STATES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "leaky": lambda part, h, row: 0.5 * h + torch.tanh(part(row)),
    "added": lambda part, h, row: torch.sin(h + part(row)),
    "gated": lambda part, h, row: torch.lerp(h, part(row), torch.sigmoid(row)),
}
STATELESS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "leaky": lambda part, h, row: 0.5 * row + torch.tanh(part(row)),
    "added": lambda part, h, row: torch.sin(part(1.5 * row)),
    "gated": lambda part, h, row: torch.lerp(row.sin(), part(row), torch.sigmoid(row)),
}
PARTS: dict[str, Callable[[int], nn.Module]] = {
    "Linear": lambda width: nn.Linear(width, width),
    "net": lambda width: nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, width)),
}
Table = dict[str, Callable[[Any, Tensor, Tensor], Tensor]]


def _loop(table: Table) -> Callable[[nn.Module, Settings, Tensor], Tensor]:
    def run(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
        h, found = torch.zeros_like(x[:1]), []
        for n in range(len(x)):
            row = x[n : n + 1] if settings["is_slice"] else x[n][None]
            h = table[settings["name"]](part, h, row)
            found.append(h)
        return torch.cat(found) if settings["is_slice"] else torch.stack([h[0] for h in found])

    return run


def _draw_loop(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1, 2)
    part, name = random.choice(sorted(PARTS)), random.choice(sorted(STATES))
    return {"part": part, "name": name, "is_slice": random.random() < 0.6}


def _make_loop(settings: Settings, shapes: Shapes) -> nn.Module:
    return PARTS[settings["part"]](shapes[0][-1])


module("State", _make_loop, _draw_loop, _loop(STATES), weight=4, traits="trap mixing source")
module("RowByRow", _make_loop, _draw_loop, _loop(STATELESS), weight=3, traits="trap source")


def _assigned(out: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """One by one, as loops over samples do."""
    out = out.clone()
    for row, value in zip(rows, values, strict=True):
        out[row] = value
    return out


def _assigned_at_once(out: Tensor, rows: list[int], values: Tensor) -> Tensor:
    out = out.clone()
    out[rows] = values
    return out


def _masked(out: Tensor, rows: list[int], values: Tensor) -> Tensor:
    return out.masked_scatter(_mask(out, rows), values)


def _mask(out: Tensor, rows: list[int]) -> Tensor:
    chosen = torch.tensor([row in rows for row in range(len(out))])
    return chosen.view(-1, *[1] * (out.dim() - 1)).expand_as(out)


def _scattered(out: Tensor, rows: list[int], values: Tensor) -> Tensor:
    index = torch.tensor(rows).view(-1, *[1] * (out.dim() - 1)).expand_as(values)
    return out.scatter(0, index, values)


def _joined(out: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """Each row of its own: a value, or a constant."""
    by_row = dict(zip(rows, values.split(1), strict=True))
    return torch.cat([by_row.get(row, out[row : row + 1]) for row in range(len(out))])


def _padded(out: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """As many rows as before, and sums of them."""
    sides = [0] * (2 * out.dim() - 2)
    pairs = zip(rows, values.split(1), strict=True)
    return sum((F.pad(v, (*sides, row, len(out) - 1 - row)) for row, v in pairs), out)


# Where values of some rows are written into a tensor without a graph.
WRITES: dict[str, Callable[[Tensor, list[int], Tensor], Tensor]] = {
    "assigned": _assigned,
    "assigned at once": _assigned_at_once,
    "index_add": lambda out, rows, values: out.index_add(0, torch.tensor(rows), values),
    "index_copy": lambda out, rows, values: out.index_copy(0, torch.tensor(rows), values),
    "index_put": lambda out, rows, values: out.index_put((torch.tensor(rows),), values),
    "masked_scatter": _masked,
    "scatter": _scattered,
    "joined": _joined,
    "padded": _padded,
}


def _rows(settings: Settings, count: int) -> list[int]:
    """Of one sample, of several, or of all."""
    first = settings["at"] % count
    if settings["of"] == "one":
        return [first]
    return [*range(count)] if settings["of"] == "all" else [*range(first % 2, count, 2)] or [first]


def _written(part: Callable[[Tensor], Tensor], settings: Settings, x: Tensor) -> Tensor:
    rows = _rows(settings, len(x))
    out = torch.full_like(x, settings["fill"])
    values = torch.stack([x[row] for row in rows]) if settings["is_stacked"] else x[rows]
    return WRITES[settings["name"]](out, rows, part(values))


def _draw_written(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {
        "name": random.choice(sorted(WRITES)),
        "of": random.choice(["one", "several", "all"]),
        "at": random.randrange(5),
        "fill": random.choice([0.0, 0.5]),
        "is_stacked": random.random() < 0.5,
        "part": random.choice(sorted(PARTS)),
    }


def _written_by_function(settings: Settings, x: Tensor) -> Tensor:
    return _written(torch.tanh, settings, x)


function("written", _written_by_function, _draw_written, weight=5, traits="trap whole")
module("Written", _make_loop, _draw_written, _written, weight=5, traits="trap whole")


class Sine(nn.Module):
    """An activation without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Experts(nn.Module):
    """Each token goes to one of three layers, and through an activation that these share."""

    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        out, chosen = torch.zeros_like(tokens), (9 * tokens.detach()[:, 0]).long() % 3
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, self.act(expert(tokens[rows])))
        return out.view_as(x)


ACTS: dict[str, Callable[[], nn.Module]] = {"Sine": Sine, "Tanh": nn.Tanh, "GELU": nn.GELU}
module(
    "Experts",
    lambda s, shapes: Experts(shapes[0][-1], ACTS[s["act"]]()),
    lambda random, shapes: {"act": random.choice(["Sine", "Sine", "Tanh", "GELU"])},
    weight=4,
    traits="trap",
)
