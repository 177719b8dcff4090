"""Sums, multiples, inverses and draws of curvature matrices."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack_core.errors import ShapeError, UsageError
from backpack_core.extensions import KFAC, KFLR, DiagGGNExact
from backpack_secondorder.kronecker import (
    KroneckerFactors,
    as_matrix,
    diagonal_matrix,
    matrix_from_state,
)
from backpack_secondorder.matrix import CurvatureMatrix, ParameterOrder
from tests.oracle import assert_close
from tests.secondorder.problems import make
from tests.secondorder.test_kronecker import NAMES, cases, psd


@pytest.fixture(params=[*NAMES, *(f"{name} eigenbasis" for name in NAMES)])
def matrix(request: pytest.FixtureRequest) -> CurvatureMatrix:
    name = request.param.removesuffix(" eigenbasis")
    factors = cases()[name]
    return factors if name == request.param else factors.eigenbasis()


def vectors_for(matrix: CurvatureMatrix, count: int = 3) -> Tensor:
    return torch.randn(count, *matrix.order.shape)


def test_multiples(matrix: CurvatureMatrix) -> None:
    dense = matrix.dense()
    for scaled in (
        0.3 * matrix,
        matrix * 0.3,
        np.float64(0.3) * matrix,
        torch.tensor(0.3) * matrix,
    ):
        assert type(scaled) is type(matrix)
        assert_close(scaled.dense(), 0.3 * dense)
    assert_close((matrix / 4).dense(), dense / 4)
    assert_close((matrix + matrix).dense(), 2 * dense)
    assert_close(sum([matrix, matrix, matrix]).dense(), 3 * dense)
    assert_close(matrix.moving_average(3 * matrix, 0.75).dense(), 1.5 * dense)
    before = matrix.clone()
    same = matrix
    same += matrix
    same *= 2
    assert_close(matrix.dense(), before.dense())
    assert_close(same.dense(), 4 * dense)


def test_what_every_matrix_can_do(matrix: CurvatureMatrix) -> None:
    dense, vectors = matrix.dense(), vectors_for(matrix)
    flat = vectors.flatten(1)
    damped = dense + 0.3 * torch.eye(len(dense))
    assert matrix.shape == dense.shape
    assert_close((matrix @ vectors).flatten(1), flat @ dense)
    assert_close((matrix @ vectors[0]).flatten(), dense @ flat[0])
    assert_close(matrix.solve(vectors, 0.3).flatten(1), torch.linalg.solve(damped, flat.T).T)
    assert_close(matrix.logdet(0.3), torch.logdet(damped))
    assert_close(matrix.trace(), dense.trace())
    assert_close(matrix.diagonal().flatten(), dense.diagonal())
    basis = matrix.eigenbasis()
    assert_close(basis.inverse(0.3).dense(), torch.linalg.inv(damped))
    assert_close(basis.damped(0.3).dense(), damped)
    assert_close(matrix.inverse().dense(), torch.linalg.inv(dense))
    root = basis.apply(torch.sqrt)
    assert_close(root.matmul(root.matmul(vectors)), matrix @ vectors)


@pytest.mark.host("its generator is of there")
def test_draws_have_the_inverse_as_covariance(matrix: CurvatureMatrix) -> None:
    """Draws are a linear map of standard normal noise: the map is what counts."""
    size = len(matrix.dense())
    generator = torch.Generator().manual_seed(3)
    draws = matrix.sample(size + 4, 0.3, generator).flatten(1)
    noise = torch.randn(size + 4, size, generator=torch.Generator().manual_seed(3))
    root = torch.linalg.lstsq(noise, draws).solution
    assert_close(noise @ root, draws)
    assert_close(root.T @ root, torch.linalg.inv(matrix.dense() + 0.3 * torch.eye(size)))
    assert matrix.sample().shape == matrix.order.shape


def test_state_and_copies(matrix: CurvatureMatrix) -> None:
    state = matrix.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    others = [
        matrix_from_state(state),
        pickle.loads(pickle.dumps(matrix)),
        copy.deepcopy(matrix),
        matrix.clone(),
        matrix.detach(),
    ]
    for other in others:
        assert type(other) is type(matrix)
        assert torch.equal(other.dense(), matrix.dense())
        assert_close((other + matrix).dense(), 2 * matrix.dense())
    single = matrix.to(torch.float32)
    assert single.dtype == torch.float32
    assert single.dense().dtype == torch.float32
    assert single.device == matrix.device
    assert matrix.to(torch.float64) is matrix


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("net", ["mlp", "convolutions", "grouped", "tokens"])
def test_sum_is_that_of_the_joined_batch(net: str, reduction: str) -> None:
    parts: list[list[Any]] = []
    for samples in (slice(0, 2), slice(2, 5), slice(0, 5)):
        torch.manual_seed(0)
        problem = make(net, 5)
        problem.lossfunc = nn.CrossEntropyLoss(reduction=reduction)
        problem.inputs = tuple(x[samples] for x in problem.inputs)
        problem.target = problem.target[samples]
        problem.run(KFLR(), DiagGGNExact())
        parts.append([m for p in problem.parameters for m in (p.kflr, as_matrix(p.diag_ggn_exact))])
    for first, second, whole in zip(*parts, strict=True):
        if reduction == "mean":
            first, second = 2 / 5 * first, 3 / 5 * second
        total = first + second
        for found, expected in zip(total, whole, strict=True):
            assert_close(found, expected)
        if len(total) > 1:
            assert_close(total.weight, whole.weight)


def test_sum_with_class_weights_and_ignored_targets() -> None:
    """The reduction divides by the weights of targets: so does the weight of the averages."""
    weight = torch.tensor([1.0, 2.0, 0.5])
    parts: list[list[KroneckerFactors]] = []
    counts = []
    for samples in (slice(0, 3), slice(3, 7), slice(0, 7)):
        torch.manual_seed(0)
        problem = make("mlp", 7)
        problem.target[4] = -100
        problem.lossfunc = nn.CrossEntropyLoss(weight=weight)
        problem.inputs, problem.target = (problem.inputs[0][samples],), problem.target[samples]
        problem.run(KFLR())
        counts.append(weight[problem.target[problem.target >= 0]].sum())
        parts.append([p.kflr for p in problem.parameters])
    for first, second, whole in zip(*parts, strict=True):
        total = counts[0] / counts[2] * first + counts[1] / counts[2] * second
        for found, expected in zip(total, whole, strict=True):
            assert_close(found, expected)


def test_moving_average_is_one_of_every_factor() -> None:
    problem = make("mlp", 4)
    problem.run(KFAC(), KFAC(savefield="other"))
    for p in problem.parameters:
        for mean in (0.9 * p.kfac + 0.1 * p.other, p.kfac.moving_average(p.other, 0.9)):
            for found, a, b in zip(mean, p.kfac, p.other, strict=True):
                assert_close(found, 0.9 * a + 0.1 * b)


@pytest.mark.parametrize("as_number", [float, torch.tensor])
def test_moving_averages_do_not_go_by_weight(as_number: Any) -> None:
    """A batch in which few targets count has a large weight ``n / counted``, and the same share."""
    order = ParameterOrder(torch.Size([3, 4]))
    first, second = ([psd(3), psd(4)] for _ in range(2))
    known = KroneckerFactors(first, order, as_number(1.0))
    mean = known.moving_average(KroneckerFactors(second, order, as_number(50.0)), 0.75)
    for found, a, b in zip(mean, first, second, strict=True):
        assert_close(found, 0.75 * a + 0.25 * b)
    assert_close(torch.as_tensor(mean.weight), torch.tensor(0.75 + 12.5))
    nothing = KroneckerFactors([0 * second[0], second[1]], order, as_number(0.0))
    mean = known.moving_average(nothing, 0.75)
    assert_close(mean[0], 0.75 * first[0])
    assert_close(mean[1], first[1])


@pytest.mark.parametrize("as_number", [float, torch.tensor])
def test_averages_go_by_weight(as_number: Any) -> None:
    order = ParameterOrder(torch.Size([3, 4]))
    first, second = ([psd(3), psd(4)] for _ in range(2))
    total = KroneckerFactors(first, order, as_number(3.0)) + KroneckerFactors(
        second, order, as_number(1.0)
    )
    assert_close(total[0], first[0] + second[0])
    assert_close(total[1], 0.75 * first[1] + 0.25 * second[1])
    assert total.weight == 4
    assert_close((total.with_weight(0.0) + KroneckerFactors(second, order))[1], second[1])


def test_the_first_average_starts_at_nothing() -> None:
    factors = cases()["two"]
    for start in (0 * cases()["two"], 0.0 * factors):
        assert_close((start + factors).dense(), factors.dense())
    nothing = 0 * factors + 0 * factors
    assert_close(nothing.dense(), 0 * factors.dense())


def test_mixed_storage_of_a_diagonal_factor() -> None:
    order = ParameterOrder(torch.Size([3, 4]))
    values, outer = torch.rand(4), psd(3)
    stored = KroneckerFactors([outer, values], order)
    formed = KroneckerFactors([outer, values.diag()], order)
    assert_close((stored + formed).dense(), 2 * stored.dense())
    assert stored.is_diagonal((stored + stored)[1])
    diagonal, block = diagonal_matrix(torch.rand(5)), psd(5)
    total = diagonal + KroneckerFactors([block], diagonal.order)
    assert_close(total.dense(), diagonal.dense() + block)


def test_what_is_refused() -> None:
    two, turned, one = cases()["two"], cases()["turned"], cases()["one"]
    with pytest.raises(UsageError, match="use list"):
        [torch.eye(3)] + two  # noqa: RUF005
    with pytest.raises(UsageError, match=r"own kind. Got list"):
        two + [torch.eye(3)]  # noqa: RUF005
    with pytest.raises(UsageError, match=r"own kind. Got KroneckerEigenbasis"):
        two + two.eigenbasis()
    with pytest.raises(ShapeError, match=r"and \[5\]"):
        two + one
    with pytest.raises(ShapeError, match="in another order"):
        two.with_factors(two) + KroneckerFactors(
            turned, ParameterOrder(two.order.shape, torch.arange(24))
        )
    with pytest.raises(ShapeError, match=r"one by one.* Got \[3, 8\]"):
        two + KroneckerFactors([psd(24)], two.order)
    with pytest.raises(UsageError, match=r"must not be negative. Got -1"):
        -1 * two
    with pytest.raises(UsageError, match="for vectors, use @"):
        two * torch.ones(3)
    with pytest.raises(UsageError, match=r"from 0 to 1. Got 1\.5"):
        two.moving_average(two, 1.5)
    with pytest.raises(UsageError, match="singular with damping=0"):
        (0 * one).solve(torch.ones(5))
    with pytest.raises(UsageError, match="negative eigenvalues"):
        diagonal_matrix(-torch.ones(3)).sample(damping=0.5)
    with pytest.raises(UsageError, match="exact"):
        cases()["three"].damped(0.1)
    with pytest.raises(ShapeError, match="square or vectors"):
        KroneckerFactors([torch.ones(3, 2)], ParameterOrder(torch.Size([6])))
    with pytest.raises(UsageError, match="Got str"):
        as_matrix("kfac")
    with pytest.raises(UsageError, match="not the state of a curvature matrix"):
        matrix_from_state({"weight": torch.ones(1)})


def test_a_damping_is_one_number(matrix: CurvatureMatrix) -> None:
    vectors, last = vectors_for(matrix), matrix.order.shape[-1]
    for damping in (torch.ones(last), "0.1", None, [0.1] * last):
        for method in (
            matrix.logdet,
            lambda d: matrix.solve(vectors, d),
            matrix.eigenbasis().damped,
        ):
            with pytest.raises(UsageError, match="The damping must be one number"):
                method(damping)  # type: ignore[arg-type]
    one = torch.full((1,), 0.3, requires_grad=True)
    assert_close(matrix.solve(vectors, one).detach(), matrix.solve(vectors, 0.3))
    assert matrix.logdet(one).shape == ()


@pytest.mark.parametrize("vectors", [[1.0], "x", None, np.ones((3, 4, 2))])
def test_vectors_are_tensors(vectors: Any) -> None:
    with pytest.raises(ShapeError, match=r"shape \[3, 4, 2\].* Got (list|str|NoneType|ndarray)"):
        cases()["two"].solve(vectors, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_up_to_rounding(dtype: torch.dtype) -> None:
    """Of K classes, the factor of a layer's outputs has rank K - 1."""
    root, inputs = torch.randn(5, 20, dtype=dtype), torch.randn(4, 9, dtype=dtype)
    root -= root.mean(0)
    order = ParameterOrder(torch.Size([5, 4]))
    singular = KroneckerFactors([root @ root.T, inputs @ inputs.T], order)
    vector = torch.randn(5, 4, dtype=dtype)
    for method in (lambda: singular.solve(vector), lambda: singular.sample(2)):
        with pytest.raises(UsageError, match=r"singular with damping=0\.0"):
            method()
    assert singular.logdet() == -torch.inf
    assert singular.solve(vector, 0.1).isfinite().all()
