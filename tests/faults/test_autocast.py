"""Automatic mixed precision around the forward pass, around the whole step, and half precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from backpack_core import backpack, extend
from backpack_core.extensions import (
    EKFAC,
    GGNMP,
    HMP,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagHessian,
    GGNGram,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from tests import oracle
from tests.cases import Problem
from tests.secondorder.problems import hessians

Made = tuple[Callable[[], nn.Module], tuple[int, ...]]
MODELS: dict[str, Made] = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
        ),
        (8,),
    ),
    "wide": (lambda: nn.Sequential(nn.Linear(400, 5), nn.Tanh(), nn.Linear(5, 3)), (400,)),
    "normalised": (
        lambda: nn.Sequential(
            nn.Linear(8, 5), nn.LayerNorm(5), nn.Softmax(1), nn.Linear(5, 4), nn.Linear(4, 3)
        ),
        (8,),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        (2, 6, 6),
    ),
    "tokens": (
        lambda: nn.Sequential(
            nn.Linear(8, 5), nn.GELU(), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 3)
        ),
        (4, 8),
    ),
}
EXTENSIONS: dict[str, Callable[[], Any]] = {
    "BatchGrad": BatchGrad,
    "BatchL2Grad": BatchL2Grad,
    "BatchDotGrad": BatchDotGrad,
    "SumGradSquared": SumGradSquared,
    "Variance": Variance,
    "ClippedSumGrad": lambda: ClippedSumGrad(0.1),
    "DiagGGNExact": DiagGGNExact,
    "BatchDiagGGNExact": BatchDiagGGNExact,
    "SqrtGGNExact": SqrtGGNExact,
    "KFLR": KFLR,
    "KFRA": KFRA,
    "EKFAC": lambda: EKFAC(mc_samples=None),
    "GGNGram": GGNGram,
    "DiagHessian": DiagHessian,
    "BatchDiagHessian": BatchDiagHessian,
    "GGNMP": GGNMP,
    "HMP": HMP,
    "PCHMP": PCHMP,
}
DTYPES = {torch.bfloat16: 0.2, torch.float16: 0.03}
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ce": (nn.CrossEntropyLoss, lambda: torch.tensor([0, 2, 1, 1, 0, 2])),
    "mse": (nn.MSELoss, lambda: torch.randn(6, 3)),
}


@pytest.fixture(autouse=True)
def _single_precision(_double_precision: None) -> None:
    torch.set_default_dtype(torch.float32)


def _problem(name: str, loss: str = "ce") -> Problem:
    make, shape = MODELS[name]
    model = make()
    x, lossfunc, target = torch.randn(6, *shape), LOSSES[loss][0](), LOSSES[loss][1]()
    return Problem(model, (x,), lossfunc, target)


def _numbers(value: Any, p: Tensor) -> Tensor:
    """A result as one tensor, in the dtype that it has."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "dense"):
        return value.dense()  # type: ignore[no-any-return]
    if hasattr(value, "gram"):
        return value.gram  # type: ignore[no-any-return]
    vectors = torch.randn(2, *p.shape, generator=torch.Generator().manual_seed(0))
    return value(vectors.to(p.dtype))  # type: ignore[no-any-return]


def _step(problem: Problem, extension: Any, dtype: torch.dtype | None, whole: bool) -> list[Tensor]:
    """The results of a step, with autocast around its forward pass or all of it."""

    def autocast(wanted: bool) -> Any:
        return torch.autocast("cpu", dtype) if dtype is not None and wanted else nullcontext()

    model, lossfunc = extend(copy.deepcopy(problem.model)), extend(copy.deepcopy(problem.lossfunc))
    with autocast(whole):
        with autocast(not whole):
            loss = lossfunc(model(*problem.inputs), problem.target)
        with backpack(extension):
            loss.backward()
        return [_numbers(getattr(p, extension.savefield), p) for p in model.parameters()]


@pytest.mark.grid(4)
@pytest.mark.parametrize("whole", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str, extension: str, whole: bool) -> None:
    """Near to single precision, and in the dtype of the parameters."""
    problem = _problem(name)
    for dtype, rtol in DTYPES.items():
        expected = _step(problem, EXTENSIONS[extension](), None, whole)
        found = _step(problem, EXTENSIONS[extension](), dtype, whole)
        for ours, reference in zip(found, expected, strict=True):
            assert ours.dtype == torch.float32
            scale = max(float(r.abs().max()) for r in expected) if extension == "PCHMP" else None
            if scale is None:
                oracle.assert_close(ours, reference, rtol)
            else:
                assert float((ours - reference).abs().max()) < rtol * scale


class Sequences(nn.Module):
    """A layer that computes in half precision between others in single precision."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table, self.inner, self.last = nn.Embedding(7, 4), inner, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.table(x))
        found = found[0] if isinstance(found, tuple) else found
        return self.last(found[:, -1])  # type: ignore[no-any-return]


INNER: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: nn.GRU(4, 4, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("make", [DiagGGNExact, partial(KFLR, fail_mode="block")])
@pytest.mark.parametrize("name", INNER)
def test_half_precision_inside_layers(name: str, make: Any) -> None:
    """Rounding there is no other term, which would make curvature wrong."""
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = Sequences(INNER[name]()), torch.randint(7, (6, 3))
        problem = Problem(model, (x,), nn.MSELoss(), torch.randn(6, 3))
        expected = _step(problem, make(), None, False)
        found = _step(problem, make(), torch.bfloat16, False)
        largest = max(float(reference.abs().max()) for reference in expected)
        for ours, reference in zip(found, expected, strict=True):
            assert float((ours - reference).abs().max()) < 0.1 * largest


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("whole", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("name", ["mlp", "normalised", "convolutions"])
def test_hessian_by_autograd(name: str, whole: bool, loss: str) -> None:
    problem = _problem(name, loss)
    model, x = copy.deepcopy(problem.model).double(), problem.inputs[0].double()
    target = problem.target.double() if loss == "mse" else problem.target
    exact = Problem(model, (x,), problem.lossfunc, target)
    torch.set_default_dtype(torch.float64)
    blocks = exact.expected(hessians)
    torch.set_default_dtype(torch.float32)
    found = _step(problem, DiagHessian(), torch.float16, whole)
    scale = max(float(block.sum(0).diagonal().abs().max()) for block in blocks)
    for ours, block in zip(found, blocks, strict=True):
        error = (ours.flatten().double() - block.sum(0).diagonal()).abs().max()
        assert float(error) < 0.03 * scale


@pytest.mark.parametrize("whole", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_solving_under_autocast(dtype: torch.dtype, whole: bool) -> None:
    """Decompositions, and products with what was computed."""
    problem = _problem("mlp")
    extend(problem.model), extend(problem.lossfunc)
    with torch.autocast("cpu", dtype):
        loss = problem.lossfunc(problem.model(*problem.inputs), problem.target)
    around = torch.autocast("cpu", dtype) if whole else nullcontext()
    with around:
        with backpack(KFLR(), GGNGram(), EKFAC(mc_samples=None)):
            loss.backward()
        for p in problem.parameters:
            vectors = torch.randn(2, *p.shape)
            # The vectors of the second were computed in the precision of the columns.
            for matrix, rtol in ((p.kflr, 1e-4), (p.ekfac, 0.1 * DTYPES[dtype])):  # type: ignore[attr-defined]
                solved = matrix.solve(vectors, 0.1)
                assert solved.dtype == torch.float32
                again = matrix.matmul(solved) + 0.1 * solved
                oracle.assert_close(again, vectors, rtol)
            inverse = p.kflr.inverse(0.1)  # type: ignore[attr-defined]
            assert inverse[0].dtype == torch.float32
            assert p.ggn_gram.eigenvectors(1).dtype == torch.float32  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_decompositions_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Computed in single precision, given in that of the parameters."""
    problem = _problem(name)
    single = _step(problem, EKFAC(mc_samples=None), None, False)
    problem.model.to(dtype)
    problem.inputs = (problem.inputs[0].to(dtype),)
    problem.run(KFLR(), EKFAC(mc_samples=None), GGNGram())
    for p, reference in zip(problem.parameters, single, strict=True):
        factors, basis, gram = p.kflr, p.ekfac, p.ggn_gram  # type: ignore[attr-defined]
        oracle.assert_close(basis.dense().float(), reference, 3 * DTYPES[dtype])
        vectors = torch.randn(2, *p.shape, dtype=dtype)
        for matrix in (factors, basis):
            solved = matrix.solve(vectors, 1.0)
            assert solved.dtype == dtype
            again = matrix.matmul(solved) + solved
            oracle.assert_close(again.float(), vectors.float(), DTYPES[dtype])
        assert factors.inverse(1.0)[0].dtype == dtype
        assert bool(factors.logdet(1.0).isfinite())
        eigenvalues = gram.spectrum.eigenvalues
        assert bool((eigenvalues >= -0.01 * eigenvalues[0]).all())
        assert gram.eigenvectors(1).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extension", ["PCHMP", "DiagHessian", "KFRA", "HMP"])
def test_curvature_in_half_precision(extension: str, dtype: torch.dtype) -> None:
    problem = _problem("normalised")
    expected = _step(problem, EXTENSIONS[extension](), None, False)
    problem.model.to(dtype)
    problem.inputs = (problem.inputs[0].to(dtype),)
    scale = max(float(reference.abs().max()) for reference in expected)
    found = _step(problem, EXTENSIONS[extension](), None, False)
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert float((ours.float() - reference).abs().max()) < 2 * DTYPES[dtype] * scale


def _bounded(layer: nn.Module) -> None:
    """A parametrization."""
    register_parametrization(layer, "weight", nn.Tanh())


@pytest.mark.parametrize("whole", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("extension", [DiagGGNExact, BatchGrad, partial(KFLR, fail_mode="block")])
@pytest.mark.parametrize("compute", [weight_norm, _bounded])
def test_computed_weights(compute: Any, extension: Any, whole: bool) -> None:
    """The leaves have another precision than what autocast computes with the weight."""
    problem = _problem("mlp")
    compute(problem.model[2])  # type: ignore[index]
    expected = _step(problem, extension(), None, whole)
    for ours, reference in zip(
        _step(problem, extension(), torch.float16, whole), expected, strict=True
    ):
        assert ours.dtype == torch.float32
        oracle.assert_close(ours, reference, 0.03)


class OnWeights(nn.Module):
    """Two heads share a weight, one of them outside of autocast; by a module, or by functions."""

    def __init__(self, by_functions: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3, bias=False)
        self.by_functions = by_functions

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.table(x)
        use = partial(F.linear, weight=self.head.weight) if self.by_functions else self.head
        found = use(h)
        with torch.autocast("cpu", enabled=False):
            return found.transpose(1, 2), use(h.tanh())


def test_losses_of_which_one_leaves_autocast() -> None:
    """A weight that autocast has converted keeps its Kronecker structure, as at a module."""
    x, y, z = torch.randint(7, (6, 3)), torch.randint(3, (6, 3)), torch.randn(6, 3, 3)
    models = [extend(OnWeights(by_functions)) for by_functions in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            one, other = model(x)
            loss = first(one, y)
        loss = loss + second(other, z)
        with backpack(KFLR(), BatchGrad()):
            loss.backward()
    module, function = (vars(model.head.weight) for model in models)
    for ours, expected in zip(function["kflr"], module["kflr"], strict=True):
        assert ours.dtype == torch.float32
        oracle.assert_close(ours, expected, 0.02)
    oracle.assert_close(function["grad_batch"], module["grad_batch"], 0.02)


class Residual(nn.Module):
    """The sum of a branch in half precision and of one in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.softplus(x + F.gelu(self.inner(x))))  # type: ignore[no-any-return]


class TurnedRound(nn.Module):
    """A weight in half precision, and transposed in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.inner(x)).float()
        with torch.autocast("cpu", enabled=False):
            h = F.linear(h, self.inner.weight.T)
        return self.last(h.to(x.dtype))  # type: ignore[no-any-return]


# Both factors of a product depend on one weight; a weight that is cast has no factors.
NOT_TURNED = {"DiagHessian", "BatchDiagHessian", "KFLR", "EKFAC"}
BRANCHES = [
    (extension, name)
    for extension in EXTENSIONS
    for name in ("residual", "turned round")
    if extension not in {"KFRA", "PCHMP"} | (NOT_TURNED if name == "turned round" else set())
]


@pytest.mark.parametrize("whole", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize(("extension", "name"), BRANCHES)
def test_uses_in_two_precisions(extension: str, name: str, whole: bool) -> None:
    model: nn.Module = Residual() if name == "residual" else TurnedRound()
    make = EXTENSIONS[extension]
    target = torch.tensor([0, 2, 1, 1, 0, 2])
    problem = Problem(model, (torch.randn(6, 8),), nn.CrossEntropyLoss(), target)
    for dtype, rtol in DTYPES.items():
        expected = _step(problem, make(), None, whole)
        found = _step(problem, make(), dtype, whole)
        scale = max(float(reference.abs().max()) for reference in expected)
        for ours, reference in zip(found, expected, strict=True):
            assert ours.dtype == torch.float32
            assert float((ours - reference).abs().max()) < rtol * scale
