"""A captured step gives what the engine gives, bit by bit, and draws the same random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from backpack_core import Extension
from backpack_core import extensions as known
from backpack_core.errors import BackpackError
from tests.capture.nets import NETS
from tests.capture.twins import Twins

CODE = ("GGNMP", "HMP", "DiagHMP", "PCHMP", "GGNGram", "JMP")  # results that are code
NAMES = [
    *("BatchGrad", "BatchL2Grad", "BatchDotGrad", "SumGradSquared", "Variance", "ClippedSumGrad"),
    *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact"),
    *("SqrtGGNMC", "DiagHessian", "BatchDiagHessian", "KFAC", "KFLR", "KFRA", "EKFAC"),
    *("Jacobians", "NTK", "TaskGrad", "TaskDotGrad", "AggregatedGrad"),
]


def made(name: str) -> Extension:
    arguments = {"ClippedSumGrad": (0.1,), "AggregatedGrad": (torch.diag,)}
    return getattr(known, name)(*arguments.get(name, ()))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the engine warns of, it warns of without a capture, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):  # for LSTMs
            yield


def test_every_extension_is_here() -> None:
    ours = ("backpack_firstorder", "backpack_secondorder")
    listed = {n for n in dir(known) if getattr(known, n).__module__.startswith(ours)}
    assert listed == {*NAMES, *CODE}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", NAMES)
def test_quantities(net: str, name: str) -> None:
    make, draw = NETS[net]
    twins = Twins(make(), [made(name)])
    batches = [draw(4) for _ in range(7)]
    try:
        twins.engine(*batches[0])
    except BackpackError as error:
        for batch in batches:
            with pytest.raises(type(error)):
                twins.step(*batch)
        return
    twins.train(batches)
    assert twins.replays == 3, twins.step.report()


@pytest.mark.parametrize("gradient", ["shared", "none", "skipped"])
@pytest.mark.parametrize("net", ["mlp", "residual", "cnn", "gru", "encoder", "tied", "frozen"])
@pytest.mark.parametrize("names", [("BatchGrad",), ("SumGradSquared", "KFAC"), ("DiagGGNExact",)])
def test_gradient_modes(net: str, gradient: str, names: tuple[str, ...]) -> None:
    make, draw = NETS[net]
    twins = Twins(make(), [made(name) for name in names], gradient=gradient)
    twins.train([draw(4) for _ in range(8)])
    assert twins.replays >= 2, twins.step.report()


@pytest.mark.parametrize("net", ["mlp", "dropout", "embedding"])
def test_several_shapes_alternate(net: str) -> None:
    make, draw = NETS[net]
    twins = Twins(make(), [made("BatchGrad"), made("KFAC")])
    twins.train([draw(2 + number % 3) for number in range(24)])
    assert twins.replays >= 9, twins.step.report()


def test_gradients_are_accumulated() -> None:
    make, draw = NETS["mlp"]
    twins = Twins(make(), [made("BatchGrad")])
    before = None
    for number in range(9):
        twins.run(*draw(4), keeps=True)
        grad = twins.model[0].weight.grad
        assert before is None or grad is before, number  # the same tensor, as with autograd
        before = grad
    assert twins.replays == 5


def test_many_extensions_at_once() -> None:
    make, draw = NETS["residual"]
    names = ["BatchGrad", "Variance", "BatchL2Grad", "DiagGGNMC", "KFAC", "KFLR", "EKFAC"]
    twins = Twins(make(), [made(name) for name in names])
    twins.train([draw(4) for _ in range(8)])
    assert twins.replays == 4
