"""Columns go through fused kernels together, and come back as one gradient after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_operations import bridge, fused, nodes
from backpack_operations.bridge import push_through
from backpack_operations.order import ranks
from tests.nets.passes import budget
from tests.oracle import assert_close

pytestmark = pytest.mark.host("no kernel of a GPU takes double precision")

N, H, L, E = 2, 3, 4, 5


def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    out = F.scaled_dot_product_attention(q, k, v, **options)
    node: Any = out.grad_fn
    return out, node


@pytest.mark.parametrize("mask", [None, (L, L), (1, 1, L, L), (N, 1, L, L), (N, H, L, L)], ids=str)
@pytest.mark.parametrize("bytes_", [1, 2**26])
def test_as_one_by_one(mask: tuple[int, ...] | None, bytes_: int) -> None:
    q, k, v = (torch.randn(N, H, L, E, requires_grad=True) for _ in range(3))
    shown = None if mask is None else torch.randn(mask)
    out, node = kernel(q, k, v, attn_mask=shown, scale=0.3, is_causal=mask is None)
    assert nodes.operation_of(node) in fused._KERNELS
    mat = torch.randn(7, *out.shape)
    with budget(bytes_), mock.patch.object(torch, "vmap", side_effect=AssertionError):
        found = bridge.push(node, {0: mat})
    each = [torch.autograd.grad(out, [q, k, v], g, retain_graph=True) for g in mat]
    for position, expected in enumerate(zip(*each, strict=True)):
        assert_close(found[position], torch.stack(expected))


@pytest.mark.parametrize("mask", [None, (L, L), (N, H, L, L)], ids=str)
@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("bytes_", [1, 2**26])
def test_attention_by_its_formula(
    mask: tuple[int, ...] | None, columns: int, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the kernel of cuDNN, which is called by autograd alone."""
    formulas = dict.fromkeys(fused._KERNELS, fused.attention_by_formula)
    monkeypatch.setattr(fused, "_KERNELS", formulas)
    q, k, v = (torch.randn(N, H, L, E, requires_grad=True) for _ in range(3))
    shown = None if mask is None else torch.randn(mask)
    out, node = kernel(q, k, v, attn_mask=shown, scale=0.3, is_causal=mask is None)
    mat = torch.randn(columns, *out.shape)
    with budget(bytes_), mock.patch.object(torch, "vmap", side_effect=AssertionError):
        found = bridge.push(node, {0: mat})
    each = [torch.autograd.grad(out, [q, k, v], g, retain_graph=True) for g in mat]
    for position, expected in enumerate(zip(*each, strict=True)):
        assert_close(found[position], torch.stack(expected))


def test_heads_that_share_keys_and_values() -> None:
    q = torch.randn(N, 6, L, E, requires_grad=True)
    k, v = (torch.randn(N, 2, L, E, requires_grad=True) for _ in range(2))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    mat = torch.randn(3, *out.shape)
    options = {"dropout_p": 0.0, "is_causal": False, "scale": None, "attn_mask": None}
    saved = {"query": q, "key": k, "value": v, **options}
    node = SimpleNamespace(**{f"_saved_{name}": value for name, value in saved.items()})
    found = fused.attention_by_formula(node, mat)
    each = [torch.autograd.grad(out, [q, k, v], g, retain_graph=True) for g in mat]
    for ours, expected in zip(found or (), zip(*each, strict=True), strict=True):
        assert_close(ours, torch.stack(expected))


def test_an_operand_without_gradient() -> None:
    q, k = (torch.randn(N, H, L, E, requires_grad=True) for _ in range(2))
    out, node = kernel(q, k, torch.randn(N, H, L, E))
    assert {*bridge.push(node, {0: torch.randn(3, *out.shape)})} == {0, 1}


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("alpha", [None, 1.0, -0.5])
def test_one_factor_of_a_matrix_product(alpha: float | None, columns: int) -> None:
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    c = torch.randn(5, 4, requires_grad=True)
    out = a.mm(b.T) if alpha is None else torch.addmm(c, a, b.T, alpha=alpha, beta=2)
    node, position = out.grad_fn, 0 if alpha is None else 1
    assert node is not None
    mat = torch.randn(columns, 5, 4)
    whole, one = bridge.push(node, {0: mat}), bridge.push(node, {0: mat}, {position})
    assert {*one} == {position}
    assert len(whole) > 1
    assert_close(one[position], whole[position])
    for others in ({*whole}, {max(whole)}):
        found = bridge.push(node, {0: mat}, others)
        assert_close(found[max(whole)], whole[max(whole)])


PRODUCTS: dict[str, Any] = {
    "bmm": (torch.bmm, (5, 2, 3), (5, 3, 4)),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=1), (3, 2, 6), (4, 2, 3)),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2, dilation=2), (3, 4, 5, 6), (6, 2, 2, 2)),
    "one sample": (lambda x, w: F.conv2d(x, w, groups=2), (1, 4, 5, 4), (6, 2, 2, 1)),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1, padding=1),
        (3, 2, 4, 3),
        (2, 5, 3, 3),
    ),
    "volume": (lambda x, w: F.conv3d(x, w), (2, 2, 3, 4, 3), (3, 2, 2, 2, 2)),
}


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("name", PRODUCTS)
def test_one_factor_of_other_products(name: str, columns: int) -> None:
    function, *shapes = PRODUCTS[name]
    x, w = (torch.randn(shape, requires_grad=True) for shape in shapes)
    out = function(x, w)
    mat = torch.randn(columns, *out.shape, requires_grad=True)
    one = bridge.push(out.grad_fn, {0: mat}, {0})
    assert {*one} == {0}
    each = [torch.autograd.grad(out, x, g, create_graph=True)[0] for g in mat]
    assert_close(one[0], torch.stack(each))
    weights = torch.randn(columns, *x.shape)
    again = [
        torch.autograd.grad((weights * found).sum(), (mat, w), retain_graph=True)
        for found in (one[0], torch.stack(each))
    ]
    for mine, right in zip(*again, strict=True):
        assert_close(mine, right)


def test_what_is_differentiated_again_is_left_to_torch() -> None:
    """The kernel has no second derivative, and says so."""
    q, k, v = (torch.randn(N, H, L, E, requires_grad=True) for _ in range(3))
    out, node = kernel(q, k, v)
    mat = torch.randn(3, *out.shape, requires_grad=True)
    assert fused.fused_product(node, {0: mat}) is None


@pytest.mark.parametrize("dim", [0, 1, 2, None])
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_weight_normalisation(dim: int | None, frozen: int | None) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2).double(), dim=dim)
    leaves = [layer.parametrizations.weight.original0, layer.parametrizations.weight.original1]
    if frozen is not None:
        leaves[frozen].requires_grad_(False)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    weight = layer.weight
    assert weight.grad_fn is not None
    mat = torch.randn(5, *weight.shape).double()
    order = ranks(weight.grad_fn)
    pushed = push_through(order, {(weight.grad_fn, weight.output_nr): mat})
    found = {node.variable: columns for (node, _), columns in pushed.items()}  # type: ignore[attr-defined]
    for column in range(5):
        expected = torch.autograd.grad(weight, trained, mat[column], retain_graph=True)
        for leaf, gradient in zip(trained, expected, strict=True):
            torch.testing.assert_close(found[leaf][column], gradient)


@pytest.mark.parametrize("columns", [1, 2])
def test_weight_normalisation_twice(columns: int) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).double())
    leaves = g, v = [*layer.parametrizations.parameters()]
    weight, mat = layer.weight, torch.randn(columns, 2, 3).double()
    with torch.enable_grad():
        pushed = push_through(ranks(weight.grad_fn), {(weight.grad_fn, 0): mat})  # type: ignore[arg-type]
        ours = torch.autograd.grad(sum(m.square().sum() for m in pushed.values()), leaves)  # type: ignore[arg-type]
        total = torch.zeros(())
        for column in mat:
            plainly = g * v / v.norm(dim=1, keepdim=True)  # the kernel's derivative is another
            grads = torch.autograd.grad(plainly, leaves, column, create_graph=True)
            total = total + sum(g.square().sum() for g in grads)
        plain = torch.autograd.grad(total, leaves)
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected)
