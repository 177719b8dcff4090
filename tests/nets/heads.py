"""Last layers that receive merged positions: tokens or pixels become rows of axis 0.

They are drawn for losses only, and often have more outputs than inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from torch import Tensor, nn

from tests.nets.kinds import Shapes, axes, module, need
from tests.nets.recipe import Settings

# Most outputs of all positions of a sample: the columns of exact curvature.
MOST = 24


class MergedHead(nn.Module):
    """A linear layer with positions merged into axis 0 before it, or behind it."""

    def __init__(self, merge: str, features: int, out: int, bias: bool) -> None:
        super().__init__()
        self.merge = merge
        self.flatten = nn.Flatten(0, 1)
        self.linear = nn.Linear(features, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.merge == "behind":
            behind: Tensor = self.linear(x).flatten(0, 1)
            return behind
        found: Tensor = self.linear(MERGES[self.merge](self, x))
        return found


MERGES: dict[str, Callable[[MergedHead, Tensor], Tensor]] = {
    "view": lambda part, x: x.reshape(-1, x.shape[-1]),
    "flatten": lambda part, x: x.flatten(0, 1),
    "module": lambda part, x: part.flatten(x),
    "pixels": lambda part, x: x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]),
}


def _draw(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    is_image = len(shapes[0]) == 3
    positions = shapes[0][1] * shapes[0][2] if is_image else shapes[0][0]
    need(2 * positions <= MOST)
    merge = "pixels" if is_image else random.choice(["view", "flatten", "module", "behind"])
    most = MOST // positions
    return {"merge": merge, "out": random.randint(2, min(7, most)), "bias": random.random() < 0.7}


def _make(settings: Settings, shapes: Shapes) -> nn.Module:
    features = shapes[0][0 if settings["merge"] == "pixels" else -1]
    return MergedHead(settings["merge"], features, settings["out"], settings["bias"])


module("MergedHead", _make, _draw, traits="head")
