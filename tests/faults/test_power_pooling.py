"""Power means of windows that hold zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backpack_core.errors import UnsupportedError
from backpack_core.extensions import GGNMP, BatchDiagHessian, BatchGrad, DiagGGNExact, DiagHessian
from tests import oracle
from tests.cases import Problem, classification
from tests.secondorder.problems import hessians


def _problem(norm_type: float, zeros: str) -> Problem:
    """Some entries of a window are zero, or all are."""
    activation: Any = {"some": nn.ReLU(), "none": nn.Softplus(), "whole": nn.Threshold(0.2, 0.0)}
    layers = [
        nn.Linear(4, 8), activation[zeros], nn.Unflatten(1, (2, 4)), nn.LPPool1d(norm_type, 2),
        nn.Flatten(), nn.Linear(4, 3),
    ]  # fmt: skip
    problem = classification(nn.Sequential(*layers), (4,))
    first: Any = problem.model[0]  # type: ignore[index]
    with torch.no_grad():
        first.bias[::2] += 5  # no other window is zero
        first.bias[1::2] -= 1
        if zeros == "whole":
            first.weight[:2] = 0
            first.bias[:2] = -1
    return problem


@pytest.mark.parametrize("zeros", ["none", "some", "whole"])
@pytest.mark.parametrize("norm_type", [1, 2, 3])
def test_first_order_and_gauss_newton(norm_type: float, zeros: str) -> None:
    _problem(norm_type, zeros).check()


@pytest.mark.parametrize("zeros", ["none", "some"])
@pytest.mark.parametrize("norm_type", [1, 2, 3])
def test_hessian(norm_type: float, zeros: str) -> None:
    problem = _problem(norm_type, zeros)
    blocks = problem.expected(hessians)
    problem.run(BatchDiagHessian(), DiagHessian())
    pairs = zip(blocks, problem.parameters, strict=True)
    diagonals = [b.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape) for b, p in pairs]
    problem.compare("diag_h_batch", diagonals)
    problem.compare("diag_h", [d.sum(0) for d in diagonals])


def test_hessian_where_a_window_is_zero() -> None:
    """No slope there, and so no curvature: the other entries are those without the window."""
    problem = _problem(1, "whole")
    problem.run(DiagHessian())
    for field in problem.fields("diag_h"):
        assert bool(field.isfinite().all())


def test_products_where_a_window_is_zero() -> None:
    """They are torch's derivative of its derivative, which is infinite there."""
    problem = _problem(2, "whole")
    problem.run(GGNMP())
    weight: Any = problem.parameters[0]
    with pytest.raises(UnsupportedError, match=r"LPPool of zeros.* use DiagGGNExact"):
        weight.ggnmp(torch.ones(1, *weight.shape))


@pytest.mark.parametrize("dims", [1, 2])
def test_zeros_in_the_input(dims: int) -> None:
    """At the very start, with a parameter behind them."""
    pool: Any = (nn.LPPool1d, nn.LPPool2d)[dims - 1]
    shape = (1, *(4,) * dims)
    model = nn.Sequential(
        nn.GroupNorm(1, 1), nn.Hardshrink(0.5), pool(1, 2), nn.Flatten(), nn.Linear(2**dims, 3)
    )
    problem = classification(model, shape)
    gradients = problem.expected(oracle.individual_gradients)
    problem.run(BatchGrad(), DiagGGNExact(), DiagHessian())
    problem.compare("grad_batch", gradients)
    for field in problem.fields("diag_h"):
        assert bool(field.isfinite().all())
