"""One tensor for each sample, in a list: joined, changed, and made one row of each again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.nets.kinds import Shapes, module
from tests.nets.recipe import Settings

Items = Sequence[Tensor]


def split(h: Tensor, items: Items) -> Sequence[Tensor]:
    """The rows of each item again."""
    return h.split([len(item) for item in items])


def _which(items: Items) -> Tensor:
    return torch.arange(len(items)).repeat_interleave(torch.tensor([len(item) for item in items]))


# From rows of all items to one row for each.
POOLS: dict[str, Callable[[Tensor, Items], Tensor]] = {
    "sums": lambda h, items: torch.cat([part.sum(0, keepdim=True) for part in split(h, items)]),
    "means": lambda h, items: torch.stack([part.mean(0) for part in split(h, items)]),
    "last": lambda h, items: torch.stack([part[-1] for part in split(h, items)]),
    "indexed": lambda h, items: h[torch.tensor([len(item) for item in items]).cumsum(0) - 1],
    "added": lambda h, items: h.new_zeros(len(items), h.shape[1]).index_add(0, _which(items), h),
    "attended": lambda h, items: torch.cat(
        [part.sum(1).softmax(0)[None] @ part for part in split(h, items)]
    ),
}
# What is done with items before the first layer.
JOINS: dict[str, Callable[[Items], Tensor]] = {
    "joined": torch.cat,
    "scaled": lambda items: torch.cat([*items]) / 2,
    "centred": lambda items: torch.cat([item - item.mean(0) for item in items]),
}


class Bags(nn.Module):
    """Two layers for rows of all items, and one row for each item."""

    def __init__(self, join: str, pool: str, width: int) -> None:
        super().__init__()
        self.join, self.pool = join, pool
        self.first, self.second = nn.Linear(width, 3), nn.Linear(3, 3)

    def forward(self, items: Items) -> Tensor:
        if self.join == "one by one":
            found = [torch.tanh(self.first(item)) for item in items]
            return self.second(torch.stack([h.mean(0) for h in found]))  # type: ignore[no-any-return]
        if self.join == "padded":
            mask = pad_sequence([torch.ones(len(item), 1) for item in items], batch_first=True)
            h = torch.tanh(self.first(pad_sequence([*items], batch_first=True)))
            return self.second((h * mask).sum(1))  # type: ignore[no-any-return]
        h = torch.tanh(self.first(JOINS[self.join](items)))
        return POOLS[self.pool](self.second(h).sin(), items)


def _draw(random: Random, shapes: Shapes) -> dict[str, Any]:
    join = random.choice([*sorted(JOINS), "joined", "one by one", "padded"])
    return {"join": join, "pool": random.choice(sorted(POOLS))}


def _make(settings: Settings, shapes: Shapes) -> nn.Module:
    return Bags(settings["join"], settings["pool"], shapes[0][-1])


module("Bags", _make, _draw, traits="items hessian")
