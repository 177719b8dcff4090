"""Autograd functions as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Cube(torch.autograd.Function):
    """A function of the user's, with a backward pass that is not differentiated any further."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Clamp(Cube):
    """The same under a name that torch uses for something else."""


class Blend(torch.autograd.Function):
    """A number as first argument, and two outputs."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return factor * x, x - factor

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[None, Tensor]:
        return None, ctx.factor * first + second


class Blocked(torch.autograd.Function):
    """No gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cos(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Separate(torch.autograd.Function):
    """A function with a forward pass that knows no context, which ``vmap`` may be applied to."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.cos() * grad


class Dot(torch.autograd.Function):
    """A linear layer as users write it: weights are among what a function receives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Silent(torch.autograd.Function):
    """Scales by the size of a parameter, to which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.scale = 0.5 + weight.detach().abs().mean().clamp(max=1.0)
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
