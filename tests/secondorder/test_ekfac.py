"""EKFAC: the diagonal in the eigenbasis of Kronecker factors."""

from __future__ import annotations

import pytest
import torch

from backpack_core.extensions import EKFAC, KFLR
from tests import oracle
from tests.secondorder.factors import SAMPLED_RTOL, SAMPLES
from tests.secondorder.problems import make


@pytest.mark.parametrize("net", ["mlp", "convolutions", "transposed", "grouped", "tokens"])
def test_ekfac_has_the_diagonal_in_its_basis(net: str) -> None:
    problem = make(net, 4)
    blocks = problem.expected(oracle.ggn)
    problem.run(EKFAC(None), KFLR())
    for p, block in zip(problem.parameters, blocks, strict=True):
        basis = p.ekfac
        size = p.numel()
        rotation = basis.with_values(torch.ones_like(basis.values)).rotate(
            torch.eye(size).reshape(size, *p.shape)
        )  # rows of Q
        expected = (rotation.T @ block.sum(0) @ rotation).diagonal()
        oracle.assert_close(basis.values.flatten(), expected)
        scale = block.sum(0).norm()
        assert (basis.dense() - block.sum(0)).norm() <= (
            p.kflr.dense() - block.sum(0)
        ).norm() + 1e-10 * scale


def test_ekfac_is_unbiased() -> None:
    problem = make("mlp", 2)
    problem.run(EKFAC(SAMPLES), EKFAC(None, savefield="exact"))
    for p in problem.parameters:
        oracle.assert_close(p.ekfac.dense(), p.exact.dense(), SAMPLED_RTOL)
