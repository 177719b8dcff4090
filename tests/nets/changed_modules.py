"""Modules of torch that compute something other than their class says."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nets.kinds import Shapes, module, on_axes
from tests.nets.recipe import Settings


class HalvedLinear(nn.Linear):
    """Another forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / 2, self.bias)


class StandardizedConv(nn.Conv1d):
    """Another part of the forward pass, as weight standardisation has it."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        centred = weight - weight.mean((1, 2), keepdim=True)
        return super()._conv_forward(x, centred, bias)


class LeakyTanh(nn.Tanh):
    """An activation of the user's that inherits from another one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + 0.1 * x


def double_output(part: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """A forward hook that changes the output."""
    return 2 * output


def halve_input(part: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook that changes the input."""
    return tuple(x / 2 for x in inputs)


def _hooked(settings: Settings, shapes: Shapes) -> nn.Module:
    part = nn.Linear(shapes[0][-1], 3) if settings["linear"] else nn.Tanh()
    if settings["before"]:
        part.register_forward_pre_hook(halve_input)
    else:
        part.register_forward_hook(double_output)
    return part


def _draw_hooked(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"linear": random.random() < 0.6, "before": random.random() < 0.5}


module("HalvedLinear", lambda s, shapes: HalvedLinear(shapes[0][-1], 3))
module(
    "StandardizedConv", lambda s, shapes: StandardizedConv(shapes[0][0], 2, 2), on_axes(2), weight=2
)
module("LeakyTanh", lambda s, shapes: LeakyTanh(), weight=0.7)
module("HookedModule", _hooked, _draw_hooked)
