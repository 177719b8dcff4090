"""``torch.compile``: compiled code is no graph of modules, and passes with extensions say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.errors import BridgeError
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


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("extend_first", [True, False])
def test_what_is_inside_is_refused(extend_first: bool, extension: Any) -> None:
    problem = classification(mlp(), (3,))
    model, lossfunc = compiled(problem.model, extend_first), extend(problem.lossfunc)
    loss = lossfunc(model(*problem.inputs), problem.target)
    with pytest.raises(BridgeError, match=r"compiled by torch\.compile"), backpack(extension()):
        loss.backward()


def test_the_model_that_was_compiled_has_every_quantity() -> None:
    """Compiled for plain passes, as it is for those with extensions."""
    problem = classification(mlp(), (3,))
    fast = torch.compile(problem.model, backend="aot_eager")
    plain = problem.lossfunc(fast(*problem.inputs), problem.target)
    plain.backward()
    problem.check()
