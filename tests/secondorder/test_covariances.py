"""Covariances of inputs and columns: symmetric products, formed by half."""

from __future__ import annotations

import pytest
import torch

from backpack_secondorder import covariances
from tests.oracle import assert_close


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("lies_along_positions", [False, True])
def test_symmetric_products_by_half(
    create_graph: bool, mean: bool, lies_along_positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covariances, "SYMMETRIC", 2)
    monkeypatch.setattr(covariances, "MANY", 2)
    inp = torch.randn(3, 2, 10, 4).permute(0, 3, 1, 2)  # [N, S, G, I]: patches of a convolution
    if not lies_along_positions:
        inp = inp.contiguous()
    rows = inp.mean(1, keepdim=True) if mean else inp
    expected = torch.einsum("nsgi,nsgj->gij", rows, rows)
    with torch.set_grad_enabled(create_graph):
        assert_close(covariances.outer_sum(inp, 8, 0.5, mean=mean), 0.5 * expected)
        assert_close(covariances.outer(rows.flatten(0, 1)), expected)
