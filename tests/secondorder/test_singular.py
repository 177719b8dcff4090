"""Matrices that are singular, not finite, or changed since they were decomposed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import EKFAC, KFAC, KFLR, KFRA, GGNGram
from backpack_secondorder.kronecker import KroneckerFactors, as_matrix
from backpack_secondorder.linalg import eigh
from backpack_secondorder.matrix import CurvatureMatrix, ParameterOrder
from tests.oracle import assert_close
from tests.secondorder.test_kronecker import NAMES, cases


def layer(*extensions: Any, dtype: torch.dtype = torch.double, scale: float = 1.0) -> nn.Linear:
    """A classifier, whose factor of the outputs is singular: each column of the root sums to 0."""
    model, lossfunc = extend(nn.Linear(4, 3).to(dtype)), extend(nn.CrossEntropyLoss())
    x = (torch.randn(20, 4) * scale).to(dtype)
    with backpack(*extensions):
        lossfunc(model(x), torch.randint(3, (20,))).backward()
    return model


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "solve": lambda matrix, v: matrix.solve(v),
    "inverse": lambda matrix, v: matrix.inverse(),
    "inverse, tensor": lambda matrix, v: matrix.inverse(torch.zeros(())),
    "inverse, lost in rounding": lambda matrix, v: matrix.inverse(1e-300),
    "sample": lambda matrix, v: matrix.sample(2),
    "of eigenbasis": lambda matrix, v: matrix.eigenbasis().inverse(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("field", ["kflr", "kfra", "ekfac"])
def test_singular(field: str, call: str, dtype: torch.dtype) -> None:
    if call == "inverse, lost in rounding" and field == "ekfac":
        return  # λ + damping is exact there
    model = layer(KFLR(), KFRA(), EKFAC(None), dtype=dtype)
    for p in model.parameters():
        matrix = getattr(p, field)
        with pytest.raises(UsageError, match="singular with damping="):
            CALLS[call](matrix, p.detach())
        assert matrix.logdet() == matrix.logdet(torch.zeros(())) == -inf
        dense = matrix.dense().double() + 0.1 * torch.eye(p.numel())
        v = p.detach()
        wanted = torch.linalg.solve(dense, v.flatten().double()).view(v.shape)
        assert_close(matrix.solve(v, 0.1).double(), wanted, rtol=1e-4)
        assert_close(matrix.logdet(0.1).double(), torch.logdet(dense), rtol=1e-4)


def test_regular_matrices_have_an_inverse_without_damping() -> None:
    """Small eigenvalues that are no rounding are inverted."""
    for values in ([1.0, 1e-10], [1e-200, 1e-208], [1e20, 1e8]):
        turn, _ = torch.linalg.qr(torch.randn(2, 2))
        factor = turn @ torch.diag(torch.tensor(values)) @ turn.T
        matrix = KroneckerFactors([factor, torch.eye(3)], ParameterOrder(torch.Size([2, 3])))
        unit = matrix.inverse().dense() @ matrix.dense()
        assert_close(unit, torch.eye(6), rtol=1e-4)


def test_corrected_eigenvalues_of_other_data() -> None:
    """What another batch sends where the factors of the first have nothing is no rounding."""
    model, lossfunc = extend(nn.Linear(4, 3, bias=False)), extend(nn.MSELoss(reduction="sum"))
    x = torch.randn(6, 4)
    x[:, 3] = 0
    with backpack(KFLR()):
        lossfunc(model(x), torch.randn(6, 3)).backward()
    p = model.weight
    x[:, 3] = 1
    with backpack(EKFAC(None, basis={p: p.kflr})):
        lossfunc(model(x), torch.randn(6, 3)).backward()
    assert (p.ekfac.values > 1e-3).all()
    assert_close(p.ekfac.trace(), 2 * 3 * x.square().sum())


BROKEN = {"nan": nan, "inf": inf, "minus inf": -inf}


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("name", NAMES)
def test_not_finite(name: str, value: str) -> None:
    matrix = cases()[name]
    vector = torch.randn(matrix.order.shape)
    place = len(matrix) - 1
    matrix[place].reshape(-1)[0] = BROKEN[value]
    what = f"Kronecker factor {place}" if len(matrix) > 1 else matrix.structure
    methods: list[Callable[[], Any]] = [
        lambda: matrix.solve(vector, 1.0),
        lambda: matrix.logdet(1.0),
        lambda: matrix.sample(damping=1.0),
        lambda: matrix.eigenbasis(),
    ]
    if len(matrix) < 3:
        methods.append(lambda: matrix.inverse(1.0))
    for method in methods:
        with pytest.raises(UsageError, match=f"The {what} of a parameter of .* is not finite"):
            method()


@pytest.mark.parametrize("value", BROKEN)
def test_not_finite_eigenvalues(value: str) -> None:
    basis = cases()["two"].eigenbasis()
    basis.values[1, 2] = BROKEN[value]
    vector = torch.randn(basis.order.shape)
    for method in (
        lambda: basis.solve(vector, 1.0),
        lambda: basis.logdet(1.0),
        lambda: basis.sample(damping=1.0),
        lambda: basis.inverse(1.0),
    ):
        with pytest.raises(UsageError, match=r"The matrix of a parameter of .* is not finite"):
            method()


@pytest.mark.parametrize("kind", [KFAC, KFLR, KFRA])
def test_the_parameter_is_named(kind: type[Any]) -> None:
    model = extend(nn.Sequential(nn.Flatten(), layer(kind(savefield="found"), scale=1e200)))
    weight = model[1].weight.found
    assert not weight[1].isfinite().all()
    for method in (lambda: weight.inverse(1.0), lambda: weight.moving_average(weight, 0.9).solve):
        with pytest.raises(UsageError, match=r"factor 1 of the parameter 'weight' of Linear"):
            method()(torch.ones(3, 4), 1.0)


def test_the_path_of_the_module_is_named() -> None:
    model = extend(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)))
    lossfunc = extend(nn.CrossEntropyLoss())
    x = torch.ones(5, 2)
    for extension, field in ((KFLR(), "kflr"), (KFRA(), "kfra"), (EKFAC(None), "ekfac")):
        with backpack(extension):
            lossfunc(model(x), torch.zeros(5, dtype=torch.long)).backward()
        for path, names in (("0", ("weight", "bias")), ("2", ("weight", "bias"))):
            for name in names:
                matrix = getattr(getattr(model[int(path)], name), field)
                broken = matrix.map(lambda t: t * nan)
                with pytest.raises(UsageError, match=f"parameter '{name}' of Linear '{path}' is"):
                    broken.solve(torch.ones(matrix.order.shape), 1.0)


def test_eigenvalues_in_a_pass() -> None:
    with pytest.raises(UsageError, match=r"factor 1 of the parameter 'weight' of Linear.*finite"):
        layer(EKFAC(None), scale=1e200)
    model = layer(GGNGram(), scale=1e200)
    with pytest.raises(UsageError, match="no eigenvalues, since it is not finite"):
        _ = model.weight.ggn_gram.spectrum.eigenvalues


def test_errors_of_the_decomposition_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(UsageError, match=r"\(failed to converge\): compute the matrix in"):
        eigh(torch.eye(2))


@pytest.mark.parametrize(
    "wrong", [-1.0, torch.tensor(-1.0), torch.tensor([-1e-9]), torch.tensor(nan)]
)
def test_negative_numbers(wrong: Any) -> None:
    matrix = cases()["two"]
    vector = torch.randn(matrix.order.shape)
    for each in (matrix, matrix.eigenbasis()):
        for method in (each.inverse, each.damped, each.logdet, partial(each.solve, vector)):
            with pytest.raises(UsageError, match="damping must not be negative"):
                method(damping=wrong)
        with pytest.raises(UsageError, match="must not be negative"):
            _ = wrong * each if isinstance(wrong, float) else each * wrong


# Decompositions that are kept ---------------------------------------------------------------------

CHANGES: dict[str, Callable[[KroneckerFactors], object]] = {
    "replaced": lambda f: f.__setitem__(0, 2 * f[0]),
    "replaced twice": lambda f: [f.__setitem__(0, 2 * f[0]) for _ in range(2)],
    "turned": lambda f: f.__setitem__(0, f[0].flip(-1, -2)),
    "in place": lambda f: f[0].mul_(3),
    "filled": lambda f: f[0].fill_(0),
    "in place through a view": lambda f: f[0].view(-1).mul_(3),
    "all": lambda f: f.__setitem__(slice(None), [2 * factor for factor in f]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_changed_matrix_is_decomposed_again(change: str, inference: bool) -> None:
    for _ in range(10):  # addresses are given out again
        with torch.inference_mode(inference):
            factors = cases()["two"]
            factors.eigenbasis()
            CHANGES[change](factors)
            assert_close(factors.eigenbasis().dense(), factors.dense())


def test_moving_averages_in_a_loop() -> None:
    average = cases()["two"]
    for _ in range(30):
        average[:] = [0.9 * a + 0.1 * b for a, b in zip(average, cases()["two"], strict=True)]
        vector = torch.randn(average.order.shape)
        wanted = torch.linalg.solve(average.dense() + 0.1 * torch.eye(24), vector.flatten())
        assert_close(average.solve(vector, 0.1).flatten(), wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_decomposed_by_themselves(copied: Any) -> None:
    factors = cases()["two"]
    first = factors.eigenbasis()
    other = copied(factors)
    other[0].mul_(2)
    assert_close(other.eigenbasis().dense(), 2 * first.dense())
    assert factors.eigenbasis() is first


def test_modes() -> None:
    """A decomposition of one mode is no use in another."""
    factors: CurvatureMatrix = cases()["two"]
    vector = torch.randn(factors.order.shape)
    with torch.inference_mode():
        wanted = (factors + factors).solve(vector, 0.1)
        assert_close(factors.scaled(2.0).solve(vector, 0.1), wanted)
        factors.solve(vector)
    moving = vector.clone().requires_grad_()
    factors.solve(moving).sum().backward()
    assert moving.grad is not None
    trained = factors.map(lambda t: t.clone().requires_grad_())
    with torch.no_grad():
        trained.logdet(0.1)
    trained.logdet(0.1).backward()
    first = next(iter(trained.tensors().values())).grad
    assert first is not None
    assert first.abs().sum() > 0
    assert as_matrix(torch.ones(3)).solve(torch.ones(3)).sum() == 3
