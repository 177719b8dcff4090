"""Operations that write into a value, or into a view of it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.nets.kinds import Shapes, function

REWRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": torch.relu_,
    "tanh_": torch.tanh_,
    "sigmoid_": torch.sigmoid_,
    "leaky_relu_": lambda x: F.leaky_relu_(x, 0.1),
    "elu_": F.elu_,
    "hardtanh_": F.hardtanh_,
    "mul_": lambda x: x.mul_(1.5),
    "add_": lambda x: x.add_(0.3),
    "sin_": torch.sin_,
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "masked_fill_": lambda x: x.masked_fill_(x.detach() < -0.3, 0.1),
}


def _rewrite(settings: dict[str, Any], x: Tensor) -> Tensor:
    return REWRITES[settings["name"]](x)


def _draw_rewrite(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"name": random.choice(sorted(REWRITES))}


def _rewrite_part(settings: dict[str, Any], x: Tensor) -> Tensor:
    """Changes a slice, and goes on with the whole."""
    REWRITES[settings["name"]](x.narrow(settings["axis"], 0, settings["length"]))
    return x


def _draw_rewrite_part(random: Random, shapes: Shapes) -> dict[str, Any]:
    axis = random.randint(1, len(shapes[0]))
    length = random.randint(1, shapes[0][axis - 1])
    return {"name": random.choice(sorted(REWRITES)), "axis": axis, "length": length}


def _rewrite_view(settings: dict[str, Any], x: Tensor) -> Tensor:
    """Changes all of it through another shape."""
    REWRITES[settings["name"]](x.view(len(x), -1))
    return x


function("rewrite", _rewrite, _draw_rewrite, weight=4, traits="in_place")
function("rewrite_part", _rewrite_part, _draw_rewrite_part, weight=2, traits="in_place")
function("rewrite_view", _rewrite_view, _draw_rewrite, weight=1.5, traits="in_place")

MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "sub_": lambda x, y: x.sub_(y, alpha=0.5),
    "lerp_": lambda x, y: x.lerp_(y, 0.4),
}


def _merge(settings: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    return MERGES[settings["name"]](x, y)


def _draw_merge(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"name": random.choice(sorted(MERGES))}


def _assign(settings: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    """A slice of one becomes that of the other."""
    x[:, :1] = y[:, :1]
    return x


function("merge_into", _merge, _draw_merge, arity=2, weight=3, traits="in_place matching")
function("assign", _assign, arity=2, weight=0.7, traits="in_place matching")
