"""Nodes that are said to keep the entries of axis 0 apart do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from backpack_core.graph import is_leaf
from backpack_operations import nodes
from backpack_operations.order import behind
from tests import oracle
from tests.faults.node_cases import LINEAR, PIECEWISE, PRODUCTS, QUOTIENTS

N = 3
Function = Callable[..., Any]
POINTWISE: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in """
        neg relu tanh sigmoid exp sqrt rsqrt reciprocal abs sin cos erf expm1 log1p square log clone
        """.split()  # noqa: SIM905
    },
    **{
        name: getattr(F, name)
        for name in """
        leaky_relu gelu silu mish elu celu selu softplus hardtanh hardswish hardsigmoid dropout
        """.split()  # noqa: SIM905
    },
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: torch.rsub(x, y),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "threshold": lambda x: F.threshold(x, 0.5, 0.1),
    "clamp": lambda x: x.clamp(0.3, 0.7),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 1.0),
    "cast": lambda x: x.to(torch.float32),
}
ALONG: dict[str, Callable[[Tensor, int], Any]] = {
    "transpose": lambda x, axis: x.transpose(axis, (axis + 1) % 3),
    "permute": lambda x, axis: x.permute(axis % 3, (axis + 1) % 3, (axis + 2) % 3),
    "slice": lambda x, axis: x.narrow(axis, 1, 2),
    "select": lambda x, axis: x.select(axis, 1),
    "cat": lambda x, axis: torch.cat([x, 2 * x], axis),
    "split": lambda x, axis: x.split(2, axis)[0],
    "split_with_sizes": lambda x, axis: x.split([1, x.shape[axis] - 1], axis)[1],
    "unbind": lambda x, axis: x.unbind(axis)[1],
    "softmax": lambda x, axis: x.softmax(axis),
    "log_softmax": lambda x, axis: x.log_softmax(axis),
    "sum": lambda x, axis: x.sum(axis),
    "mean": lambda x, axis: x.mean(axis, keepdim=True),
    "sums": lambda x, axis: x.sum((axis, (axis + 1) % 3)),
    "unsqueeze": lambda x, axis: x.unsqueeze(axis),
    "index_select": lambda x, axis: x.index_select(axis, torch.tensor([1, 0, 2])),
    "cumsum": lambda x, axis: x.cumsum(axis),
    "amax": lambda x, axis: x.amax(axis),
    "amin": lambda x, axis: x.amin((axis, (axis + 1) % 3), keepdim=True),
    "logsumexp": lambda x, axis: x.logsumexp(axis),
    "norm": lambda x, axis: x.norm(dim=axis, keepdim=True) + x.norm(),
    "flip": lambda x, axis: x.flip(axis),
}
OTHERS: dict[str, Function] = {
    "view": lambda x: x.reshape(-1, 2).reshape(2 * N, -1, 2).reshape(N, -1) * 2,
    "view_of_turned": lambda x: x.transpose(0, 1).reshape(N, -1) * 2,
    "expand": lambda x: x[:, :1].expand(N, 4, 6) * 2,
    "expand_rows": lambda x: x[:1].expand(N, 4, 6) * 2,
    "squeeze": lambda x: x[:, :1].squeeze(1) * 2,
    "bmm": lambda x, y: torch.bmm(x, y.mT),
    "mm": lambda x, y: x[:, 0] @ y[:, 0].mT,
    "square_mm": lambda x, y: x[:, 0, :3] @ y[:, 0, :3],
    "addmm": lambda x, y: torch.addmm(x[:, 0, :3], x[:, 1, :3], y[:, 0, :3]),
    "select": lambda x: x[:, 0] * 2,
    "select_rows": lambda x: x[0] * 2,
    "layer_norm": lambda x, y: F.layer_norm(x, [6], y[0, 0], y[0, 1]),
    "layer_norm_of_all": lambda x, y: F.layer_norm(x, [N, 4, 6], y, x),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None]),
    "nll": lambda x: F.nll_loss(x[:, :, 0], torch.zeros(N, dtype=torch.long), reduction="none"),
    "nll_2d": lambda x: F.nll_loss(
        x.unsqueeze(-1), torch.zeros(N, 6, 1, dtype=torch.long), reduction="none"
    ),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm_eval": lambda x, y: F.batch_norm(
        x, torch.zeros(4), torch.ones(4), y[0, :, 0], y[0, :, 1]
    ),
    "instance_norm": lambda x: F.instance_norm(x),
}


def _masked(gradient: Tensor, count: int, sample: int) -> Tensor:
    found = torch.zeros_like(gradient)
    found.unflatten(0, (count, -1))[sample] = gradient.unflatten(0, (count, -1))[sample]
    return found


def _see_rows(result: Any) -> int:
    """Send rows of one sample at a time through every node of a graph; how many ways were seen."""
    ways = 0
    root = result.grad_fn
    for node in {root, *behind([root])}:
        if is_leaf(node) or nodes.is_nested(node):
            continue
        metadata = node._input_metadata
        for nr, out in enumerate(metadata):
            shape = tuple(out.shape)
            if not shape or shape[0] % N or not out.dtype.is_floating_point:
                continue
            for position, (child, number) in enumerate(node.next_functions):
                if child is None or not nodes.keeps_rows(node, nr, position):
                    continue
                behind_it = nodes.shape_of(child, number)
                if not behind_it or behind_it[0] % N:
                    continue
                ways += 1
                _see_way(node, nr, position, torch.randn(shape).to(out.dtype))
    return ways


def _see_way(node: Any, nr: int, position: int, gradient: Tensor) -> None:
    for sample in range(N):
        grads = [torch.zeros(tuple(m.shape)).to(m.dtype) for m in node._input_metadata]
        grads[nr] = _masked(gradient, N, sample)
        found = node(*grads)
        found = found if isinstance(found, tuple) else (found,)
        target = node.next_functions[position]
        result = found[position].sum_to_size(nodes.shape_of(*target))
        oracle.assert_close(result, _masked(result, N, sample))


def _run(function: Function, *shape: int) -> int:
    names = getattr(function, "__code__", None)
    is_binary = names is not None and names.co_varnames[:2] == ("x", "y")
    operands = [(0.1 + torch.rand(shape)).requires_grad_() for _ in range(1 + is_binary)]
    result = function(*(operand * 1 for operand in operands))
    ways = _see_rows(result)
    if result.dtype.is_floating_point:  # what is sent back, too
        given = torch.randn_like(result).requires_grad_() * 1
        sent = torch.autograd.grad(result, operands, given, create_graph=True)
        _see_rows(torch.cat([gradient.flatten() for gradient in sent]))
    return ways


@pytest.mark.parametrize("name", POINTWISE)
def test_entry_by_entry(name: str) -> None:
    assert _run(POINTWISE[name], N, 4, 6) > 1


@pytest.mark.parametrize("axis", [*range(3), *range(-3, 0)])
@pytest.mark.parametrize("name", ALONG)
def test_along_an_axis(name: str, axis: int) -> None:
    """Also where all axes are as long."""
    _run(partial(ALONG[name], axis=axis), N, 4, 6)
    _run(partial(ALONG[name], axis=axis), N, N, N)


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    assert _run(OTHERS[name], N, 4, 6)


TABLES = LINEAR | PIECEWISE | PRODUCTS | QUOTIENTS


@pytest.mark.filterwarnings("ignore:.*[Nn]ested:UserWarning")
@pytest.mark.parametrize("kind", TABLES)
def test_every_node_of_the_tables(kind: str) -> None:
    operands = [torch.rand(2, 4, 6), torch.rand(2, 4, 4)]
    for some in (operands[:1], [operands[1], operands[1].clone()]):
        leaves = [operand.requires_grad_() for operand in some]
        try:
            result = TABLES[kind](*(leaf * 1 for leaf in leaves))
        except (TypeError, RuntimeError):
            continue
        if not result.is_nested:
            _see_rows(result)


def test_a_wrong_claim_is_seen() -> None:
    x = torch.randn(N, 4, requires_grad=True)
    with pytest.raises(AssertionError):
        _see_way((x * 1).cumsum(0).grad_fn, 0, 0, torch.randn(N, 4))
