"""A list of Kronecker factors as a matrix."""

from __future__ import annotations

import copy
from functools import reduce

import pytest
import torch
from torch import Tensor

from backpack_core.errors import ShapeError, UsageError
from backpack_core.extensions import KFLR
from backpack_secondorder.kronecker import KroneckerFactors, diagonal_matrix
from backpack_secondorder.matrix import ParameterOrder
from tests import oracle
from tests.oracle import assert_close
from tests.secondorder.problems import make


def psd(*shape: int) -> Tensor:
    half = torch.randn(*shape, shape[-1])
    return half @ half.mT + torch.eye(shape[-1])


def cases() -> dict[str, KroneckerFactors]:
    torch.manual_seed(0)
    positions = torch.arange(24).reshape(4, 3, 2).transpose(0, 1).flatten()
    return {
        "two": KroneckerFactors([psd(3), psd(8)], ParameterOrder(torch.Size([3, 4, 2]))),
        "one": KroneckerFactors([psd(5)], ParameterOrder(torch.Size([5]))),
        "three": KroneckerFactors([psd(2), psd(3), psd(2)], ParameterOrder(torch.Size([6, 2]))),
        "groups": KroneckerFactors([psd(2, 3), psd(2, 4)], ParameterOrder(torch.Size([6, 4]))),
        "turned": KroneckerFactors(
            [psd(3), psd(8)], ParameterOrder(torch.Size([4, 3, 2]), positions)
        ),
        "diagonal": diagonal_matrix(torch.rand(3, 4) + 0.5),
        "diagonal inner": KroneckerFactors(
            [psd(3), torch.rand(8) + 0.5], ParameterOrder(torch.Size([4, 3, 2]), positions)
        ),
        "diagonal outer": KroneckerFactors(
            [torch.rand(2, 3) + 0.5, psd(2, 4)], ParameterOrder(torch.Size([6, 4]))
        ),
    }


NAMES = [*cases()]


@pytest.fixture(params=NAMES)
def factors(request: pytest.FixtureRequest) -> KroneckerFactors:
    return cases()[request.param]


def test_dense(factors: KroneckerFactors) -> None:
    full = [torch.diag_embed(f) if factors.is_diagonal(f) else f for f in factors]
    if factors.groups == 1:
        expected = reduce(torch.kron, full)
    else:
        expected = torch.block_diag(*[torch.kron(a, b) for a, b in zip(*full, strict=True)])
    if factors.order.positions is not None:
        rows = factors.order.positions
        turned = torch.zeros_like(expected)
        turned[rows[:, None], rows[None, :]] = expected
        expected = turned
    assert_close(factors.dense(), expected)


def test_products_and_solves(factors: KroneckerFactors) -> None:
    dense, shape = factors.dense(), factors.order.shape
    vectors = torch.randn(3, *shape)
    flat = vectors.flatten(1)
    assert_close(factors.matmul(vectors).flatten(1), flat @ dense)
    assert_close(factors.matmul(vectors[0]).flatten(), dense @ flat[0])
    damped = dense + 0.3 * torch.eye(len(dense))
    assert_close(factors.solve(vectors, 0.3).flatten(1), torch.linalg.solve(damped, flat.T).T)
    assert_close(factors.solve(vectors[0]).flatten(), torch.linalg.solve(dense, flat[0]))
    assert_close(factors.diagonal().flatten(), dense.diagonal())
    assert factors.diagonal().shape == shape
    assert_close(factors.trace(), dense.trace())
    assert_close(factors.logdet(0.3), torch.logdet(damped))


def test_eigenbasis(factors: KroneckerFactors) -> None:
    basis, dense = factors.eigenbasis(), factors.dense()
    assert_close(basis.dense(), dense)
    assert_close(basis.trace(), dense.trace())
    assert_close(basis.values.flatten().sort().values, torch.linalg.eigvalsh(dense))
    vectors = torch.randn(2, *factors.order.shape)
    assert_close(basis.rotate(vectors).norm(dim=1), vectors.flatten(1).norm(dim=1))


def test_eigenbasis_is_computed_once_and_again_after_a_change(
    factors: KroneckerFactors,
) -> None:
    first = factors.eigenbasis()
    assert factors.eigenbasis() is first
    factors[0].mul_(2)
    assert_close(factors.eigenbasis().values, 2 * first.values)
    factors[0] = factors[0] / 2
    assert_close(factors.eigenbasis().values, first.values)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "three"])
def test_factored_damping(name: str) -> None:
    factors = cases()[name]
    damped, inverse = factors.damped(0.2), factors.inverse(0.2)
    assert_close(inverse.dense() @ damped.dense(), torch.eye(len(damped.dense())))
    if len(factors) == 1:
        assert_close(damped.dense(), factors.dense() + 0.2 * torch.eye(len(factors.dense())))
        return
    # Both parts of the damping that is added have the same trace.
    full = [torch.diag_embed(f) if factors.is_diagonal(f) else f for f in factors]
    shifted = [torch.diag_embed(f) if damped.is_diagonal(f) else f for f in damped]
    for g in range(factors.groups):
        first, second = (f.reshape(-1, *f.shape[-2:])[g] for f in full)
        one, two = (f.reshape(-1, *f.shape[-2:])[g] for f in shifted)
        left, right = one - first, two - second
        assert_close(left.trace() * right.trace() / len(left) / len(right), torch.tensor(0.2))
        assert_close(left.trace() * second.trace(), first.trace() * right.trace())


def test_conventions_of_damping() -> None:
    factors = cases()["two"]
    for per_factor, shift in ((False, 0.2**0.5), (True, 0.2)):
        damped = factors.damped(0.2, balanced=False, per_factor=per_factor)
        inverse = factors.inverse(0.2, balanced=False, per_factor=per_factor)
        balanced = factors.damped(0.2, per_factor=per_factor)
        for factor, other in zip(factors, damped, strict=True):
            assert_close(other, factor + shift * torch.eye(len(factor)))
        for mine, other in zip(inverse, damped, strict=True):
            assert_close(mine @ other, torch.eye(len(other)))
        shifts = [(b - f)[0, 0] for f, b in zip(factors, balanced, strict=True)]
        assert_close(shifts[0] * shifts[1], torch.tensor(shift**2))


def test_bad_arguments() -> None:
    factors = cases()["two"]
    with pytest.raises(ShapeError, match=r"shape \[3, 4, 2\]"):
        factors.matmul(torch.randn(4, 3, 2))
    with pytest.raises(UsageError, match="must not be negative"):
        factors.solve(torch.randn(3, 4, 2), -1.0)
    with pytest.raises(UsageError, match="two factors"):
        cases()["three"].damped(0.1)
    singular = factors.with_factors([torch.zeros(3, 3), psd(8)])
    with pytest.raises(UsageError, match=r"singular with damping=0\.0"):
        singular.inverse()
    with pytest.raises(ShapeError, match="has 24 entries"):
        factors.with_factors([psd(2), psd(8)])


def test_still_a_list() -> None:
    factors = cases()["two"]
    assert len(factors) == 2
    assert [f.shape[0] for f in factors] == [3, 8]
    assert [*factors, torch.eye(1)][:2] == [factors[0], factors[1]]
    again = copy.copy(factors)
    assert_close(again.dense(), factors.dense())


@pytest.mark.parametrize("net", ["transposed", "convolutions", "grouped", "tokens"])
def test_vectors_have_the_shape_of_the_parameter(net: str) -> None:
    """For one sample and one position, so that the product is the block."""
    problem = make(net, 1)
    problem.run(KFLR("expand"))
    for p in problem.parameters:
        vectors = torch.randn(2, *p.shape)
        assert_close(p.kflr.matmul(vectors).flatten(1), vectors.flatten(1) @ p.kflr.dense())


def test_order_of_transposed_convolutions() -> None:
    """One output position of one sample: the Kronecker product is the block, in torch's order."""
    problem = make("transposed", 1)
    problem.model = torch.nn.Sequential(
        torch.nn.ConvTranspose1d(2, 3, 2, stride=2, padding=0), torch.nn.Flatten()
    )
    problem.inputs = (torch.randn(1, 2, 1),)
    problem.lossfunc = torch.nn.MSELoss()
    problem.target = torch.randn(1, 6)
    blocks = problem.expected(oracle.ggn)
    problem.run(KFLR("expand"))
    weight = problem.parameters[0]
    # Two output pixels with kernel entries of their own: A is block-diagonal over the kernel.
    assert_close(
        2 * weight.kflr.dense() / weight.kflr.dense().trace(),
        2 * blocks[0][0] / blocks[0][0].trace(),
    )
