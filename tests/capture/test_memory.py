"""Replays write into the memory of the results that they replace, if nothing holds these."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from backpack_products.recycled import SMALLEST

SAMPLES, WIDTH = 16, 128


def _step(model: nn.Module) -> Any:
    lossfunc = extend(nn.MSELoss())
    return capture(lambda x: lossfunc(model(x), 0 * x), model, lossfunc, BatchGrad())


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def _right(model: nn.Module, x: Tensor) -> Tensor:
    with backpack(BatchGrad(savefield="right")):
        nn.functional.mse_loss(model(x), 0 * x).backward()
    found: Tensor = model[0].weight.right  # type: ignore[index, union-attr, assignment]
    return found


@pytest.mark.host("torch itself recycles the memory of a GPU")
def test_memory_is_written_again() -> None:
    model = _model()
    step, weight = _step(model), model[0].weight
    addresses = []
    for _ in range(15):
        step(torch.randn(SAMPLES, WIDTH))
        assert weight.grad_batch.nbytes >= SMALLEST  # type: ignore[attr-defined]
        addresses.append(weight.grad_batch.data_ptr())  # type: ignore[attr-defined]
    assert re.search(r"[1-9]\d* replays", step.report())
    assert len({*addresses[-4:]}) == 1


def test_results_that_are_held_keep_their_numbers() -> None:
    model = _model()
    step, weight = _step(model), model[0].weight
    held, expected = list[Tensor](), list[Tensor]()
    for number in range(15):
        x = torch.randn(SAMPLES, WIDTH)
        expected.append(_right(model, x).clone())
        step(x)
        result: Tensor = weight.grad_batch  # type: ignore[attr-defined]
        held.append(result[1:] if number % 2 else result)
    assert re.search(r"[1-9]\d* replays", step.report())
    for number, (ours, right) in enumerate(zip(held, expected, strict=True)):
        torch.testing.assert_close(ours, right[1:] if number % 2 else right)


class Trainer:
    """Holds its own step, as trainers do."""

    def __init__(self) -> None:
        self.model, self.lossfunc = _model(), extend(nn.MSELoss())
        self.step = capture(self.loss, self.model, self.lossfunc, BatchGrad())

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = self.lossfunc(self.model(x), 0 * x)
        return found


def test_an_object_that_holds_its_step_is_captured() -> None:
    trainer = Trainer()
    for _ in range(12):
        trainer.step(torch.randn(SAMPLES, WIDTH))
    assert re.search(r"[1-9]\d* replays", trainer.step.report())


def test_a_model_of_a_single_layer_is_captured() -> None:
    """It has both hooks, whose order is settled by the first call."""
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    for _ in range(6):
        step(torch.rand(4, 3), torch.randint(2, (4,)))
    assert re.search(r"[1-9]\d* replays", step.report())


@pytest.mark.host("torch itself recycles the memory of a GPU")
def test_the_engine_takes_turns_with_a_step() -> None:
    """Each writes into the memory of what the other has stored."""
    model = _model()
    step, weight, lossfunc = _step(model), model[0].weight, extend(nn.MSELoss())
    addresses = []
    for _ in range(23):  # none of the last is compared
        step(torch.randn(SAMPLES, WIDTH))
        with backpack(BatchGrad()):
            x = torch.randn(SAMPLES, WIDTH)
            lossfunc(model(x), 0 * x).backward()
        addresses.append(weight.grad_batch.data_ptr())  # type: ignore[attr-defined]
    assert re.search(r"[1-9]\d* replays", step.report())
    assert len({*addresses[-4:]}) == 1
    torch.testing.assert_close(weight.grad_batch, _right(model, x))  # type: ignore[attr-defined]
