"""Covariances of inputs and columns: symmetric products, formed by half."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import KFAC
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


@pytest.mark.parametrize("sharing", ["kfc", "expand", "reduce"])
def test_weight_and_bias_of_one_position_share_a_covariance(
    sharing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formed once, and stored twice in memory of its own."""
    formed, outer = [], covariances.outer

    def counted(vectors: Tensor, scale: float = 1.0) -> Tensor:
        formed.append(vectors.shape)
        return outer(vectors, scale)

    monkeypatch.setattr(covariances, "outer", counted)
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())
    with backpack(KFAC(weight_sharing=sharing), check="never"):
        lossfunc(model(torch.randn(5, 4)), torch.randint(0, 3, (5,))).backward()
    assert formed == [(5, 1, 3)]
    weight, bias = model.weight.kfac[0], model.bias.kfac[0]  # type: ignore[union-attr, index]
    assert torch.equal(weight, bias)
    assert weight.data_ptr() != bias.data_ptr()
