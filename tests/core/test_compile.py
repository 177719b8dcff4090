"""``torch.compile``: compiled code is no graph of modules, and passes with extensions say so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.errors import BridgeError, UncoveredParameterWarning
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests.cases import classification, mlp


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, extend_first: bool) -> nn.Module:
    if extend_first:
        return torch.compile(extend(model), backend="aot_eager")
    return extend(torch.compile(model, backend="aot_eager"))


@pytest.mark.parametrize("extend_first", [True, False])
def test_it_warns_once_where_parameters_are_left_out(extend_first: bool) -> None:
    problem = classification(mlp(), (3,))
    model, lossfunc = compiled(problem.model, extend_first), extend(problem.lossfunc)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = lossfunc(model(*problem.inputs), problem.target)
            with backpack(BatchGrad()):
                loss.backward()
    found = [w for w in seen if issubclass(w.category, UncoveredParameterWarning)]
    assert ["torch.compile" in str(w.message) for w in found] == [True]
    assert not any(hasattr(p, "grad_batch") for p in problem.model.parameters())
    assert all(p.grad is not None for p in problem.model.parameters())


@pytest.mark.filterwarnings("ignore::backpack_core.errors.UncoveredParameterWarning")
@pytest.mark.parametrize("extend_first", [True, False])
def test_curvature_is_refused(extend_first: bool) -> None:
    problem = classification(mlp(), (3,))
    model, lossfunc = compiled(problem.model, extend_first), extend(problem.lossfunc)
    loss = lossfunc(model(*problem.inputs), problem.target)
    with pytest.raises(BridgeError, match=r"compiled by torch\.compile"), backpack(DiagGGNExact()):
        loss.backward()


def test_the_model_that_was_compiled_has_every_quantity() -> None:
    """Compiled for plain passes, as it is for those with extensions."""
    problem = classification(mlp(), (3,))
    fast = torch.compile(problem.model, backend="aot_eager")
    plain = problem.lossfunc(fast(*problem.inputs), problem.target)
    plain.backward()
    problem.check()
