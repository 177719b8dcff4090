"""Models that changed since ``extend``, or of which a part was never extended."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend, is_extended, unextend
from backpack_core.errors import (
    NotExtendedError,
    UnsupportedError,
)
from backpack_core.extensions import KFRA, BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Problem


class Adapter(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.down = inner, nn.Linear(3, 2, bias=False)
        self.up = nn.Parameter(torch.full((3, 2), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + self.down(x) @ self.up.T
        return result


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


def replace(model: nn.Sequential) -> None:
    model[2] = nn.Linear(3, 3)


def wrap(model: nn.Sequential) -> None:
    model[0] = Adapter(model[0])


def run_as_it_is(problem: Problem, extension: Any) -> None:
    loss = extend(problem.lossfunc)(problem.model(*problem.inputs), problem.target)
    with backpack(extension):
        loss.backward()


CHANGES = [append, replace, wrap]


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed(change: Any, extension: Any) -> None:
    """What was put there since is no module that reports itself, but a part of its model."""
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    assert is_extended(model)
    change(model)
    assert not is_extended(model)
    problem = Problem(model, (torch.randn(4, 3),), nn.MSELoss(), torch.randn(4, 3))
    if extension is BatchGrad:
        expected = problem.expected(oracle.individual_gradients)
    else:
        expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_as_it_is(problem, extension())
    problem.compare(extension.savefield, expected)
    extend(model)
    assert is_extended(model)
    run_as_it_is(problem, extension())
    problem.compare(extension.savefield, expected)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_column_needs_a_model_that_is_extended(change: Any) -> None:
    """A quantity that cannot be had where functions use parameters is refused by name."""
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    change(model)
    problem = Problem(model, (torch.randn(4, 3),), nn.MSELoss(), torch.randn(4, 3))
    with pytest.raises(UnsupportedError, match="is not an extended part"):
        run_as_it_is(problem, KFRA())


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_only_the_loss_is_extended(extension: Any) -> None:
    model, lossfunc = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2))
    expected = rf"Only the loss \(MSELoss\) is extended, and 4 .* {extension.__name__} would"
    with pytest.raises(NotExtendedError, match=expected), backpack(extension()):
        loss.backward()


def test_is_extended() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential())
    model = nn.ModuleDict({"a": inner, "b": nn.MultiheadAttention(4, 2)})
    assert not is_extended(model)
    extend(inner)
    assert is_extended(inner)
    assert not is_extended(model)
    assert is_extended(extend(model))
    assert not is_extended(unextend(model))
