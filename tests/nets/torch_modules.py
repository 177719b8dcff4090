"""Modules of torch with one input and one output: affine maps, norms, activations, shapes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.nets.kinds import Make, Shapes, axes, divisor, module, need, on_axes
from tests.nets.recipe import Settings


def _draw_linear(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"out": random.randint(1, 4), "bias": random.random() < 0.8}


module(
    "Linear",
    lambda s, shapes: nn.Linear(shapes[0][-1], s["out"], bias=s["bias"]),
    _draw_linear,
    weight=8,
    traits="hessian",
)


def _draw_convolution(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    groups = divisor(random, shapes[0][0]) if random.random() < 0.3 else 1
    settings: dict[str, Any] = {
        "out": groups * random.randint(1, 3),
        "kernel": random.randint(1, 3),
        "stride": random.choice([1, 1, 2]),
        "padding": random.randint(0, 1),
        "bias": random.random() < 0.8,
        "groups": groups,
    }
    if random.random() < 0.2:
        settings["mode"] = random.choice(["circular", "replicate", "reflect"])
    return settings


def _convolution(settings: Settings, shapes: Shapes) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d)[len(shapes[0]) - 2]
    return kind(
        shapes[0][0],
        settings["out"],
        settings["kernel"],
        stride=settings["stride"],
        padding=settings["padding"],
        groups=settings["groups"],
        bias=settings["bias"],
        padding_mode=settings.get("mode", "zeros"),
    )


module("Conv", _convolution, _draw_convolution, weight=5, traits="hessian")


def _transposed_convolution(settings: Settings, shapes: Shapes) -> nn.Module:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[len(shapes[0]) - 2]
    return kind(
        shapes[0][0],
        settings["out"],
        settings["kernel"],
        stride=settings["stride"],
        padding=settings["padding"] if settings["kernel"] > 1 else 0,
        groups=settings["groups"],
        bias=settings["bias"],
    )


module("ConvTranspose", _transposed_convolution, _draw_convolution, weight=2, traits="hessian")


def _draw_layer_norm(random: Random, shapes: Shapes) -> dict[str, Any]:
    need(shapes[0][-1] > 2)
    return {
        "axes": random.randint(1, len(shapes[0])),
        "affine": random.random() < 0.8,
        "bias": random.random() < 0.7,
    }


def _layer_norm(settings: Settings, shapes: Shapes) -> nn.Module:
    shape = list(shapes[0][-settings["axes"] :])
    return nn.LayerNorm(shape, elementwise_affine=settings["affine"], bias=settings["bias"])


module("LayerNorm", _layer_norm, _draw_layer_norm, weight=3)
module(
    "RMSNorm",
    lambda s, shapes: nn.RMSNorm(
        list(shapes[0][-s["axes"] :]), eps=1e-3, elementwise_affine=s["affine"]
    ),
    _draw_layer_norm,
)


def _draw_group_norm(random: Random, shapes: Shapes) -> dict[str, Any]:
    groups = divisor(random, shapes[0][0])
    size = shapes[0][0] // groups
    for length in shapes[0][1:]:
        size *= length
    need(size > 2)
    return {"groups": groups, "affine": random.random() < 0.8}


def _run_group_norm(part: nn.Module, settings: Settings, x: Tensor) -> Any:
    """On channels first: torch 2.13 crashes on channels last whose gradient nobody wants.

    For torch, ``[N, C, 1, 1]`` may have channels last and be contiguous.
    """
    x = x.contiguous()
    return part(x if x.requires_grad else x.clone(memory_format=torch.contiguous_format))


module(
    "GroupNorm",
    lambda s, shapes: nn.GroupNorm(s["groups"], shapes[0][0], affine=s["affine"]),
    _draw_group_norm,
    _run_group_norm,
    weight=3,
)


def _draw_instance_norm(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    need(shapes[0][-1] > 2)
    return {"affine": random.random() < 0.7}


module(
    "InstanceNorm",
    lambda s, shapes: (nn.InstanceNorm1d, nn.InstanceNorm2d)[len(shapes[0]) - 2](
        shapes[0][0], affine=s["affine"]
    ),
    _draw_instance_norm,
    weight=4,
)


def _batch_norm(settings: Settings, shapes: Shapes) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shapes[0]) - 1]
    return kind(shapes[0][0], affine=settings["affine"]).eval()


def _draw_batch_norm(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1, 2, 3)
    return {"affine": random.random() < 0.8}


module("BatchNorm", _batch_norm, _draw_batch_norm, weight=2, traits="hessian")

module(
    "LocalResponseNorm",
    lambda s, shapes: nn.LocalResponseNorm(2),
    on_axes(2, 3),
    weight=0.3,
)

# Not Hardsigmoid: torch differentiates it in single precision, whatever the input has.
SMOOTH = ("Sigmoid", "Tanh", "ELU", "SELU", "CELU", "SiLU", "GELU", "Mish", "Softplus", "Softsign")
PIECEWISE = ("ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Hardswish", "Softshrink")
OTHERS = ("LogSigmoid", "Tanhshrink", "Hardshrink")
REWRITING = [
    "ReLU",
    "ReLU6",
    "LeakyReLU",
    "ELU",
    "SELU",
    "CELU",
    "SiLU",
    "Mish",
    "Hardtanh",
    "Hardswish",
]


def _draw_activation(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"name": random.choice([*SMOOTH, *PIECEWISE, *OTHERS])}


def _draw_rewriting(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"name": random.choice(REWRITING)}


module(
    "Activation",
    lambda s, shapes: getattr(nn, s["name"])(),
    _draw_activation,
    weight=6,
    traits="hessian",
)
module(
    "InplaceActivation",
    lambda s, shapes: getattr(nn, s["name"])(inplace=True),
    _draw_rewriting,
    weight=6,
    traits="hessian in_place",
)
module(
    "PReLU",
    lambda s, shapes: nn.PReLU(shapes[0][0] if s["many"] else 1),
    lambda random, shapes: {"many": random.random() < 0.5},
    traits="hessian",
)


def _draw_axis(random: Random, shapes: Shapes) -> dict[str, Any]:
    axis = random.randint(1, len(shapes[0]))
    need(shapes[0][axis - 1] > 1)
    return {"axis": axis}


module("Softmax", lambda s, shapes: nn.Softmax(s["axis"]), _draw_axis, traits="hessian")
module("LogSoftmax", lambda s, shapes: nn.LogSoftmax(s["axis"]), _draw_axis, weight=0.5)


def _draw_halves(random: Random, shapes: Shapes) -> dict[str, Any]:
    fitting = [a for a, length in enumerate(shapes[0], 1) if length % 2 == 0]
    need(fitting)
    return {"axis": random.choice(fitting)}


module("GLU", lambda s, shapes: nn.GLU(s["axis"]), _draw_halves, weight=0.7)


def _draw_pool(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    need(min(shapes[0][1:]) > 1)
    kinds = ("MaxPool", "AvgPool", "LPPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
    settings = {"name": random.choice(kinds), "size": random.randint(1, 2)}
    if settings["name"] in {"MaxPool", "AvgPool"}:
        settings["stride"] = random.randint(1, 2)
    return settings


def _pool(settings: Settings, shapes: Shapes) -> nn.Module:
    kind: Callable[..., nn.Module] = getattr(nn, f"{settings['name']}{len(shapes[0]) - 1}d")
    if settings["name"] == "LPPool":
        return kind(2, settings["size"])
    if "stride" in settings:
        return kind(settings["size"], stride=settings["stride"])
    return kind(settings["size"])


module("Pool", _pool, _draw_pool, weight=3, traits="hessian")


def _unflatten(settings: Settings, shapes: Shapes) -> nn.Module:
    axis = settings["axis"]
    return nn.Unflatten(axis, (shapes[0][axis - 1] // settings["last"], settings["last"]))


def _draw_unflatten(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1, 2)
    axis = random.randint(1, len(shapes[0]))
    return {"axis": axis, "last": divisor(random, shapes[0][axis - 1])}


def _draw_flatten(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"start": random.randint(1, len(shapes[0]))}


module("Flatten", lambda s, _: nn.Flatten(s["start"]), _draw_flatten, weight=2, traits="hessian")
module("Unflatten", _unflatten, _draw_unflatten, weight=2, traits="hessian")
module("Identity", lambda s, shapes: nn.Identity(), weight=2, traits="hessian")


def _dropout(kind: type[nn.Module], training: bool) -> Make:
    def make(settings: Settings, shapes: Shapes) -> nn.Module:
        return kind(settings["p"]).train(training)

    return make


def _draw_dropout(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"p": random.choice([0.2, 0.5])}


def _draw_channel_dropout(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    return _draw_dropout(random, shapes)


module("DropoutOff", _dropout(nn.Dropout, False), _draw_dropout, traits="hessian")
module("Dropout", _dropout(nn.Dropout, True), _draw_dropout, weight=1.5, traits="hessian random")
module(
    "AlphaDropout",
    _dropout(nn.AlphaDropout, True),
    _draw_dropout,
    weight=0.3,
    traits="random",
)
module(
    "Dropout1d", _dropout(nn.Dropout1d, True), _draw_channel_dropout, weight=0.3, traits="random"
)


def _draw_padding(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    need(min(shapes[0][1:]) > 1)
    return {"name": random.choice(["ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad"])}


module(
    "Pad",
    lambda s, shapes: getattr(nn, f"{s['name']}{len(shapes[0]) - 1}d")(1),
    _draw_padding,
    weight=0.7,
    traits="hessian",
)
module(
    "Upsample",
    lambda s, shapes: nn.Upsample(scale_factor=2),
    on_axes(2, 3),
    weight=0.5,
    traits="hessian",
)
