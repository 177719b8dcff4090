"""Complex numbers: the right quantity, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core.errors import UnsupportedError
from backpack_core.extensions import (
    EKFAC,
    GGNMP,
    HMP,
    KFAC,
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
    DiagGGNMC,
    DiagHessian,
    GGNGram,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.faults.refusal import right_or_refused

COMPLEX = torch.complex128


class Phases(nn.Module):
    """Complex parameters, and no rule."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=COMPLEX))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, dtype=COMPLEX)


# [N, 4] complex to [N, 4] complex.
WITH_PARAMETERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: _linear(4, 4),
    "two": lambda: nn.Sequential(_linear(4, 4), _linear(4, 4)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, dtype=COMPLEX), nn.Flatten()
    ),
    "no_rule": lambda: nn.Sequential(Phases(4), Phases(4)),
    "curved": lambda: nn.Sequential(_linear(4, 4), nn.Tanh(), _linear(4, 4)),
}
WITHOUT: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "flatten": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten()),
    "nothing": nn.Identity,
}
# What is still a number that means something for a complex parameter.
MEANINGFUL = [BatchGrad, BatchL2Grad, BatchDotGrad]
MEANINGLESS: list[Callable[[], Any]] = [
    SumGradSquared,
    Variance,
    lambda: ClippedSumGrad(1e-3),
    DiagGGNExact,
    DiagGGNMC,
    BatchDiagGGNExact,
    SqrtGGNExact,
    KFAC,
    KFLR,
    KFRA,
    EKFAC,
    GGNGram,
    GGNMP,
    DiagHessian,
    BatchDiagHessian,
    HMP,
    PCHMP,
]
NAMES = [type(make()).__name__ for make in MEANINGLESS]


def _problem(inside: nn.Module) -> Problem:
    """Real, complex by the Fourier transform, ``inside``, and real again by the absolute value."""
    model = Net(
        lambda net, x: net.last(net.inside(torch.fft.fft(net.first(x))).abs()),
        first=nn.Linear(3, 4),
        inside=inside,
        last=nn.Linear(4, 3),
    )
    return classification(model, (3,), 4)


def _gradients(problem: Problem) -> list[Tensor]:
    """As torch defines them for complex parameters: one sample's part of the loss at a time."""
    model = copy.deepcopy(problem.model)
    parameters = list(model.parameters())
    found = []
    for x, y in zip(problem.inputs[0], problem.target, strict=True):
        loss = problem.lossfunc(model(x[None]), y[None]) / len(problem.target)
        found.append(torch.autograd.grad(loss, parameters))
    return [torch.stack(column) for column in zip(*found, strict=True)]


def _reference(extension: Any, gradient: Tensor) -> Tensor:
    flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    flat = flat.flatten(1)
    if isinstance(extension, BatchGrad):
        return gradient
    return flat.square().sum(1) if isinstance(extension, BatchL2Grad) else flat @ flat.T


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("make", MEANINGFUL)
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_complex_parameters(name: str, make: Any) -> None:
    problem = _problem(WITH_PARAMETERS[name]())
    expected = _gradients(problem)
    extension = make()
    with right_or_refused("complex"):
        problem.run(extension)
        for ours, gradient in zip(problem.fields(extension.savefield), expected, strict=True):
            oracle.assert_close(ours, _reference(extension, gradient))


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("make", MEANINGLESS, ids=NAMES)
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_complex_parameters_have_no_squares(name: str, make: Any) -> None:
    with pytest.raises(UnsupportedError):
        _problem(WITH_PARAMETERS[name]()).run(make())


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", WITHOUT)
def test_complex_activations(name: str, second: bool) -> None:
    """Parameters before and behind them are real."""
    with right_or_refused("complex", may_refuse=name != "nothing"):
        _problem(WITHOUT[name]()).check(first=not second, second=second)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_frozen_complex_parameters() -> None:
    """They get no quantity, and are passed."""
    problem = _problem(nn.Sequential(Phases(4), Phases(4)))
    problem.model.inside.requires_grad_(False)  # type: ignore[operator, union-attr]
    problem.check()
