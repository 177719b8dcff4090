"""Repeated passes look at the size of numbers anew: on the host, norms come from what is faster."""

from __future__ import annotations

from operator import mul
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import recorded_visits, visits
from backpack_core import backpack, extend
from backpack_core.extensions import ClippedSumGrad
from backpack_secondorder.outputs import SumOutputs


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FIRST", 1)
    torch.set_default_dtype(torch.float32)


# Squares of rows are computed at once from 2**16 numbers on.
SHAPES = {"squares_of_rows": (64, 2048), "squares_by_gram": (5, 8, 24)}


def _model(shape: tuple[int, ...]) -> nn.Module:
    return extend(nn.Sequential(nn.Linear(shape[-1], 40, bias=False), nn.Flatten()))


LOSS = extend(SumOutputs())


def _pass(model: nn.Module, x: Tensor, extension: Any) -> tuple[list[Any], int]:
    """Results, and whether the pass repeated a recording."""
    with backpack(extension, gradient="none") as block:
        LOSS(model(x)).backward()
    found = [getattr(p, extension.savefield) for p in model.parameters()]
    return found, block.summary().passes.get("repeated a recording", 0)


def _clipped(model: nn.Module, x: Tensor, bound: float) -> list[Tensor]:
    """Sums of clipped gradients by autograd, in double precision."""
    parameters, model = [*model.parameters()], model.double()
    rows = [torch.autograd.grad(model(row[None]).sum(), parameters) for row in x.double()]
    model.float()
    norms = [sum(g.square().sum() for g in grads) ** 0.5 for grads in rows]
    weights = [min(1.0, bound / float(norm)) for norm in norms]
    return [sum(map(mul, weights, grads)) for grads in zip(*rows, strict=True)]


# Squares leave the range of single precision.
@pytest.mark.parametrize(("size", "bound"), [(1e-24, 1e-28), (1e20, 1.0)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sizes_change_while_a_pass_repeats(
    shape: tuple[int, ...], size: float, bound: float
) -> None:
    model, repeated = _model(shape), 0
    for factor in (*[1.0] * 12, size, 1.0, size):
        x = factor * torch.randn(shape)
        found, is_repeated = _pass(model, x, ClippedSumGrad(bound))
        repeated += is_repeated
        for own, total in zip(found, _clipped(model, x, bound), strict=True):
            torch.testing.assert_close(own.double(), total, rtol=1e-4, atol=1e-4 * bound)
    assert repeated > 4


@pytest.mark.parametrize("name", SHAPES)
def test_a_recording_has_one_operation_that_looks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = [], recorded_visits.pausing
    monkeypatch.setattr(
        recorded_visits, "pausing", lambda *given: written.append(write(*given)) or written[-1]
    )
    model, x = _model(SHAPES[name]), torch.randn(SHAPES[name])
    for _ in range(12):
        _pass(model, x, ClippedSumGrad(1.0))
    assert [f"backpack_{name}_default(" in code.text for code in written] == [True]
