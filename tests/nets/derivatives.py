"""Derivatives of nets in their inputs, as physics asks for them, and penalties on gradients."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.nets.kinds import Shapes, axes, divisor, module, need
from tests.nets.recipe import Settings, Shape


def _perceptron(settings: Settings, shape: Shape) -> nn.Module:
    """Where a norm is among its layers, the derivative uses its bias, and sends it nothing."""
    norm = [nn.LayerNorm(3, eps=0.1)] if settings["bias"] else []
    return nn.Sequential(nn.Linear(shape[-1], 3), *norm, nn.Tanh(), nn.Linear(3, 1, bias=False))


def _normalised(settings: Settings, shape: Shape) -> nn.Module:
    """By the statistics of other data."""
    affine = settings["bias"]
    if len(shape) == 1:
        norm: nn.Module = nn.BatchNorm1d(3, affine=affine)
        return nn.Sequential(nn.Linear(shape[0], 3), norm, nn.Tanh(), nn.Linear(3, 1)).eval()
    if len(shape) == 2:
        norm = nn.BatchNorm1d(shape[0], affine=affine)
        return nn.Sequential(norm, nn.Tanh(), nn.Linear(shape[1], 2)).eval()
    convolution = nn.Conv2d(shape[0], 2, 1)
    return nn.Sequential(convolution, nn.BatchNorm2d(2, affine=affine), nn.Tanh()).eval()


def _attention(settings: Settings, shape: Shape) -> nn.Module:
    heads, bias = settings["heads"], settings["bias"]
    return nn.MultiheadAttention(shape[1], heads, bias=bias, batch_first=settings["first"])


def _layer(settings: Settings, shape: Shape) -> nn.Module:
    options = {"norm_first": settings["bias"], "batch_first": settings["first"], "bias": False}
    return nn.TransformerEncoderLayer(shape[1], settings["heads"], 3, 0.0, "gelu", **options)


INNER: dict[str, Callable[[Settings, Shape], nn.Module]] = {
    "perceptron": _perceptron,
    "normalised": _normalised,
    "attention": _attention,
    "layer": _layer,
}


def _draw(random: Random, shapes: Shapes) -> dict[str, Any]:
    name = random.choice(sorted(INNER))
    if name in {"attention", "layer"}:
        axes(shapes[0], 2)
        need(shapes[0][1] > 2)
    heads = divisor(random, shapes[0][-1])
    drawn = {key: random.random() < 0.5 for key in ("bias", "first", "attached")}
    return {"name": name, "heads": heads, **drawn}


def _applied(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    if settings["name"] not in {"attention", "layer"}:
        return part(x)  # type: ignore[no-any-return]
    x = x if settings["first"] else x.transpose(0, 1)
    result = part(x, x, x)[0] if settings["name"] == "attention" else part(x)
    return result if settings["first"] else result.transpose(0, 1)


def _derivative(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # other kernels have no second one
        is_attached = settings["attached"] and x.requires_grad
        inner = x if is_attached else x.detach().clone().requires_grad_()
        total = _applied(part, settings, inner).sin().sum()
        (found,) = torch.autograd.grad(total, inner, create_graph=True)
    return x + found


module(
    "Derivative",
    lambda s, shapes: INNER[s["name"]](s, shapes[0]),
    _draw,
    _derivative,
    weight=3,
)
