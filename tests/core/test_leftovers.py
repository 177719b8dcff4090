"""What tests leave behind is noticed, also where it hangs on something that had survived before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from tests.leftovers import left_behind, settle, state


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = extend(nn.MSELoss())(model(torch.rand(4, 3)), torch.rand(4, 2))
    return loss


@pytest.mark.parametrize("is_old", [False, True])
def test_a_loss_that_is_kept(is_old: bool) -> None:
    circle: list[Any] = []
    circle.append(circle)
    model, before = extend(nn.Linear(3, 2)), state()
    if is_old:
        settle()
    circle.append(_loss(model))
    assert left_behind(before)["calls alive"] == (before["calls alive"], before["calls alive"] + 2)
    del circle
    assert left_behind(before) == {}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.filterwarnings("ignore:.*reference cycle")
def test_results_with_a_graph_of_their_parameter_are_dropped(is_old: bool) -> None:
    """Garbage that no collection frees: autograd does not tell what its nodes hold."""
    model, before = extend(nn.Linear(3, 2)), state()
    if is_old:
        settle()
    with backpack(BatchGrad()):
        _loss(model).backward(create_graph=True)
    assert state()["calls alive"] > before["calls alive"]
    del model
    assert left_behind(before) == {}


def test_a_gradient_with_a_graph_that_only_an_output_wants() -> None:
    """Autograd then calls the hook on the output, but none on the output's node."""
    model, before = extend(nn.Linear(3, 2)), state()
    output = model(torch.rand(4, 3))
    with backpack(BatchGrad()):
        torch.autograd.grad(output.square().sum(), output, create_graph=True)
    del output
    assert left_behind(before) == {}
