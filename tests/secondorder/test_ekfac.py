"""EKFAC: the diagonal in the eigenbasis of Kronecker factors."""

from __future__ import annotations

import pytest
import torch

from backpack_core.errors import ShapeError, UsageError
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


@pytest.mark.parametrize("net", ["mlp", "convolutions", "transposed", "grouped", "tokens"])
def test_sums_in_a_given_basis_are_those_of_the_joined_batch(net: str) -> None:
    """Two passes: the factors of all data, then eigenvalues batch by batch."""
    problem = make(net, 5)
    problem.lossfunc.reduction = "sum"
    blocks = [block.sum(0) for block in problem.expected(oracle.ggn)]
    problem.run(KFLR())
    basis = {p: p.kflr for p in problem.parameters}
    found = []
    for samples in (range(2), range(2, 5)):
        problem.run(EKFAC(None, subsampling=[*samples], basis=basis))
        found.append([p.ekfac for p in problem.parameters])
    for p, first, second, block in zip(problem.parameters, *found, blocks, strict=True):
        total = first + second
        rotation = total.rotate(torch.eye(p.numel()).reshape(p.numel(), *p.shape))
        oracle.assert_close(total.values.flatten(), (rotation.T @ block @ rotation).diagonal())
        assert total.has_vectors_of(p.kflr.eigenbasis())


def test_a_basis_for_every_parameter() -> None:
    problem = make("mlp", 2)
    first, *others = problem.parameters
    problem.run(KFLR())
    basis = {p: p.kflr for p in others}
    for wrong in (1, "kfac", {"weight": 1}, {first: torch.eye(3)}):
        with pytest.raises(UsageError, match="basis must map parameters to matrices"):
            EKFAC(basis=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without eigenvectors for the parameter 'weight'"):
        problem.run(EKFAC(basis=basis))
    with pytest.raises(ShapeError, match="eigenvectors for a parameter of shape"):
        problem.run(EKFAC(basis={**basis, first: others[0].kflr}))


def test_sums_need_one_basis() -> None:
    problem = make("mlp", 4)
    problem.run(EKFAC(None, subsampling=[0, 1]), EKFAC(None, subsampling=[2], savefield="other"))
    weight = problem.parameters[0]
    with pytest.raises(UsageError, match=r"EKFAC\(basis=...\) in a second pass"):
        weight.ekfac + weight.other
