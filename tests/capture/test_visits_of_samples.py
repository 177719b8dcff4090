"""Passes with ``samples=`` go by plans, and repeat: the engine's numbers, whatever index comes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import backpack_core.extensions as known
from backpack_capture import visits
from backpack_core import backpack, extend
from backpack_core.errors import BackpackError
from backpack_core.extensions import BatchGrad
from backpack_operations.plan import plans
from tests.capture.nets import NETS
from tests.capture.test_visits import Twin, by_the_engine

EXTENSIONS: dict[str, Any] = {
    name: getattr(known, name) for name in ("BatchGrad", "BatchDiagGGNExact")
}
EXTENSIONS["ClippedSumGrad"] = lambda: known.ClippedSumGrad(0.05)
ROWS = 6


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FIRST", 1)


def _indices() -> list[Tensor]:
    """Each of two indices several times in a row, and in turn; and one without any repetition."""
    one, other = torch.tensor([0, 1, 1, 0, 2, 0]), torch.tensor([1, 0, 0, 0, 1, 1])
    usual = torch.arange(ROWS)
    return [one] * 12 + [other, one] * 2 + [other] * 6 + [usual] * 3 + [one[:-1]] * 3


@pytest.mark.grid(3)
@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("net", ["mlp", "cnn", "embedding", "tied", "encoder"])
def test_any_index(net: str, extension: str) -> None:
    torch.manual_seed(0)
    model, make = NETS[net].make(), EXTENSIONS[extension]
    ours, right = Twin(copy.deepcopy(model)), Twin(model)
    for index in _indices():
        batch = NETS[net].draw(len(index))
        for one, other in zip(ours.model.parameters(), right.model.parameters(), strict=True):
            one.data.copy_(other.data)
        plans.forget(right.model)
        with by_the_engine():
            try:
                expected = right.step(batch, make(), samples=index)
            except BackpackError:
                pytest.skip("it does not exist for this net")
        found = ours.step(batch, make(), samples=index)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert ours.repeated


def test_an_index_that_does_not_fit_raises_in_any_pass() -> None:
    model, lossfunc = extend(NETS["mlp"].make()), extend(torch.nn.CrossEntropyLoss())
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    for number in range(10):
        inputs, targets = NETS["mlp"].draw(ROWS if number < 8 else ROWS - 1)
        for given in (index, index[:-1]):
            loss, is_fitting = lossfunc(model(inputs), targets), len(given) == len(inputs)
            says = f"{len(given)} entries, and the model received {len(inputs)} rows"
            refused = nullcontext() if is_fitting else pytest.raises(BackpackError, match=says)
            with refused, backpack(BatchGrad(), samples=given):
                loss.backward()


def test_only_an_index_that_comes_again_is_planned() -> None:
    model, lossfunc = extend(NETS["mlp"].make()), extend(torch.nn.CrossEntropyLoss())
    for number in range(12):
        inputs, targets = NETS["mlp"].draw(ROWS)
        index = torch.tensor([number, *range(ROWS - 1)])
        loss = lossfunc(model(inputs), targets)
        with backpack(BatchGrad(), samples=index) as block:
            loss.backward()
        assert block._history["surveyed: samples=... has another index than the last passes"] == 1
    assert not plans._known.get(model)
