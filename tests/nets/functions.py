"""Functional operations between modules."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.nets.kinds import Shapes, axes, divisor, function, need, on_axes
from tests.nets.own_functions import Blend, Blocked, Clamp, Cube
from tests.nets.recipe import Settings

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "sin": torch.sin,
    "square": torch.square,
    "abs": torch.abs,
    "exp": lambda x: torch.exp(-x.abs()),
    "reciprocal": lambda x: 1 / (1 + x**2),
    "leaky": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked": lambda x: x.masked_fill(x < -0.5, 0.3),
    "clamp": lambda x: x.clamp(-0.4, 0.6),
    "affine": lambda x: 1 - 2.5 * x,
    "number_first": lambda x: 0.5 + x,
    "clone": torch.clone,
    "detached_gate": lambda x: x * torch.sigmoid(x.detach()),
    "detached_part": lambda x: x + x.detach(),
    "cube": Cube.apply,
    "clamp_in_name_only": Clamp.apply,
    "blocked": lambda x: x + Blocked.apply(x),
    "hardtanh": F.hardtanh,
    "erf": torch.erf,
}


def _draw_elementwise(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"name": random.choice(sorted(ELEMENTWISE))}


function("elementwise", lambda s, x: ELEMENTWISE[s["name"]](x), _draw_elementwise, weight=4)


def _draw_smooth(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"name": random.choice(["affine", "clone", "relu", "leaky", "clamp_in_name_only"])}


function(
    "piecewise",
    lambda s, x: ELEMENTWISE[s["name"]](x),
    _draw_smooth,
    weight=0.5,
    traits="hessian",
)


def _blend(settings: Settings, x: Tensor) -> Any:
    apply: Any = Blend.apply
    return apply(0.3, x)


function("blend", _blend, weight=0.5)

ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda x, a: x.softmax(a),
    "log_softmax": lambda x, a: x.log_softmax(a),
    "cumsum": lambda x, a: x.cumsum(a),
    "normalize": lambda x, a: F.normalize(x + 0.1, dim=a),
    "centre": lambda x, a: x - x.mean(a, keepdim=True),
    "standardize": lambda x, a: (x - x.mean(a, True)) / (x.std(a, keepdim=True) + 0.5),
    "maximum": lambda x, a: x * x.amax(a, keepdim=True),
    "logsumexp": lambda x, a: x - x.logsumexp(a, keepdim=True),
    "flip": lambda x, a: x.flip(a),
    "roll": lambda x, a: x.roll(1, a),
    "sort": lambda x, a: x.sort(a).values,
    "first": lambda x, a: x * x.narrow(a, 0, 1),
    "doubled": lambda x, a: torch.cat([x, x], a),
    "halves": lambda x, a: torch.cat(x.chunk(2, a)[::-1], a),
    "parts": lambda x, a: torch.stack([p.sin() for p in x.unbind(a)], a),
    "gather": lambda x, a: x.gather(a, x.detach().argsort(a)),
    "take": lambda x, a: x.index_select(a, torch.tensor([0, x.shape[a] - 1, 0])),
    "multiples": lambda x, a: (
        x * torch.arange(1.0, 1 + x.shape[a]).view(-1, *[1] * (x.dim() - a - 1))
    ),
    "expand": lambda x, a: x.narrow(a, 0, 1).expand_as(x) + x,
}


def _draw_axis(random: Random, shapes: Shapes) -> dict[str, Any]:
    axis = random.randint(1, len(shapes[0]))
    need(shapes[0][axis - 1] > 1)
    return {"name": random.choice(sorted(ALONG)), "axis": axis}


function("along", lambda s, x: ALONG[s["name"]](x, s["axis"]), _draw_axis, weight=4)

LINEAR_ALONG = ("cumsum", "centre", "flip", "roll", "doubled", "halves", "take", "multiples")


def _draw_linear_along(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {**_draw_axis(random, shapes), "name": random.choice(LINEAR_ALONG)}


function(
    "linear_along",
    lambda s, x: ALONG[s["name"]](x, s["axis"]),
    _draw_linear_along,
    weight=0.7,
    traits="hessian",
)

REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": lambda x, a: x.mean(a),
    "sum": lambda x, a: x.sum(a),
    "max": lambda x, a: x.max(a).values,
    "logsumexp": lambda x, a: x.logsumexp(a),
    "norm": lambda x, a: (x + 0.1).norm(dim=a),
    "prod": lambda x, a: (1 + x).prod(a),
}


def _draw_reduction(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    axis = random.randint(1, len(shapes[0]))
    return {"name": random.choice(sorted(REDUCTIONS)), "axis": axis}


function("reduce", lambda s, x: REDUCTIONS[s["name"]](x, s["axis"]), _draw_reduction, weight=2)


def _draw_permutation(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    order = list(range(1, len(shapes[0]) + 1))
    random.shuffle(order)
    return {"order": order}


def _permute(settings: Settings, x: Tensor) -> Tensor:
    return x.permute(0, *settings["order"])


function("permute", _permute, _draw_permutation, weight=2, traits="hessian")


def _draw_view(random: Random, shapes: Shapes) -> dict[str, Any]:
    size = 1
    for length in shapes[0]:
        size *= length
    last = divisor(random, size)
    middle = divisor(random, size // last)
    shape = random.choice([[-1], [-1, last], [-1, middle, last]])
    return {"shape": shape}


function(
    "reshape",
    lambda s, x: x.reshape(len(x), *s["shape"]),
    _draw_view,
    weight=2,
    traits="hessian",
)


def _draw_slice(random: Random, shapes: Shapes) -> dict[str, Any]:
    axis = random.randint(1, len(shapes[0]))
    start = random.randint(0, shapes[0][axis - 1] - 1)
    return {"axis": axis, "start": start, "length": random.randint(1, shapes[0][axis - 1] - start)}


function(
    "narrow",
    lambda s, x: x.narrow(s["axis"], s["start"], s["length"]),
    _draw_slice,
    weight=1.5,
    traits="hessian",
)


def _draw_select(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2, 3)
    axis = random.randint(1, len(shapes[0]))
    return {"axis": axis, "index": random.randrange(shapes[0][axis - 1])}


function("select", lambda s, x: x.select(s["axis"], s["index"]), _draw_select, weight=1)


def _draw_chunk(random: Random, shapes: Shapes) -> dict[str, Any]:
    axis = random.randint(1, len(shapes[0]))
    need(shapes[0][axis - 1] > 1)
    return {"axis": axis}


function("chunk", lambda s, x: x.chunk(2, s["axis"]), _draw_chunk, weight=1.5, traits="hessian")


def _time_first(settings: Settings, x: Tensor) -> Tensor:
    return x.transpose(0, 1).cumsum(0).transpose(0, 1)


function("time_first", _time_first, on_axes(2, 3), weight=0.5)


def _self_attention(settings: Settings, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.roll(1, 2), x.flip(1), is_causal=settings["causal"])


def _draw_self_attention(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    return {"causal": random.random() < 0.5}


function("self_attention", _self_attention, _draw_self_attention)
function(
    "merged_heads",
    lambda s, x: torch.bmm(m := x.flatten(0, 1)[:, None], m.mT.softmax(1)).view(len(x), -1),
    on_axes(2),
    weight=0.4,
)

PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "residual": lambda x, y: x + 0.5 * y,
    "gate": lambda x, y: x * torch.sigmoid(y),
    "maximum": torch.maximum,
    "div": lambda x, y: x / (1 + y**2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "where": lambda x, y: torch.where(x > y, x, y.sin()),
}


def _draw_pair(random: Random, shapes: Shapes) -> dict[str, Any]:
    return {"name": random.choice(sorted(PAIRS))}


function(
    "pair",
    lambda s, x, y: PAIRS[s["name"]](x, y),
    _draw_pair,
    arity=2,
    weight=4,
    traits="matching",
)
function(
    "sum_of_branches",
    lambda s, x, y: x + y,
    arity=2,
    traits="matching hessian",
)


def _draw_joint(random: Random, shapes: Shapes) -> dict[str, Any]:
    axis = random.randint(1, len(shapes[0]))
    rest = [list(s) for s in shapes]
    for shape in rest:
        need(len(shape) == len(shapes[0]))
        del shape[axis - 1]
    need(rest[0] == rest[1])
    return {"axis": axis}


function("cat", lambda s, x, y: torch.cat([x, y], s["axis"]), _draw_joint, arity=2, weight=3)


def _draw_products(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    axes(shapes[1], 2)
    need(shapes[0][1] == shapes[1][1])
    return {"name": random.choice(["matmul", "einsum", "cdist"])}


def _product(settings: Settings, x: Tensor, y: Tensor) -> Tensor:
    if settings["name"] == "matmul":
        return x @ y.mT
    if settings["name"] == "einsum":
        return torch.einsum("nik,njk->nij", x, y)
    return torch.cdist(x, y + 0.7)


function("product", _product, _draw_products, arity=2, weight=5)


def _draw_vectors(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1)
    axes(shapes[1], 1)
    return {}


function(
    "outer",
    lambda s, x, y: torch.einsum("ni,nj->nij", x, y),
    _draw_vectors,
    arity=2,
    weight=2,
)
function(
    "broadcast",
    lambda s, x, y: x * y.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1)),
    arity=2,
)


def _draw_long(random: Random, shapes: Shapes) -> dict[str, Any]:
    need(max(shapes[0]) > 2)
    return {}


function(
    "layer_norm",
    lambda s, x: F.layer_norm(x, x.shape[1:]),
    _draw_long,
)
function("detach", lambda s, x: x.detach(), weight=0.4)
