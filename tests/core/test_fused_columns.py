"""Columns go through fused attention together, and come back as one gradient after the other."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from backpack_operations import bridge, fused
from tests.nets.passes import budget
from tests.oracle import assert_close

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
    assert node.name().startswith(fused._ATTENTION)
    mat = torch.randn(7, *out.shape)
    with budget(bytes_), mock.patch.object(torch, "vmap", side_effect=AssertionError):
        found = bridge.push(node, {0: mat})
    each = [torch.autograd.grad(out, [q, k, v], g, retain_graph=True) for g in mat]
    for position, expected in enumerate(zip(*each, strict=True)):
        assert_close(found[position], torch.stack(expected))


def test_an_operand_without_gradient() -> None:
    q, k = (torch.randn(N, H, L, E, requires_grad=True) for _ in range(2))
    out, node = kernel(q, k, torch.randn(N, H, L, E))
    assert {*bridge.push(node, {0: torch.randn(3, *out.shape)})} == {0, 1}


def test_what_is_differentiated_again_is_left_to_torch() -> None:
    """The kernel has no second derivative, and says so."""
    q, k, v = (torch.randn(N, H, L, E, requires_grad=True) for _ in range(3))
    out, node = kernel(q, k, v)
    mat = torch.randn(3, *out.shape, requires_grad=True)
    assert fused.fused_product(node, {0: mat}) is None
