"""Micro-batches, and gradient scalers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.errors import NotAnExtensionError, ShapeError, UnsupportedError, UsageError
from backpack_core.extensions import (
    EKFAC,
    KFLR,
    KFRA,
    BatchGrad,
    ClippedSumGrad,
    DiagGGNExact,
    GGNGram,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_data import Weights, all_reduce, combined, unscale
from backpack_products import FirstOrderExtension
from backpack_products.operations import dense
from tests.data.problems import DETERMINISTIC, assert_same, batches, data, expected, loss, net


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_are_the_whole_batch(reduction: str):
    asked = [e() for e in DETERMINISTIC]
    wanted = expected(asked, *data(), reduction)
    model, lossfunc = extend(net()), extend(loss(reduction))
    total = combined(model, *[e() for e in DETERMINISTIC])
    for round_ in range(2):
        for x, y in batches(*data(), 2, 4, 1):
            with total:
                lossfunc(model(x), y).backward()
        for (name, field), value in wanted.items():
            assert_same(getattr(model.get_parameter(name), field), value)
        if not round_:
            total.reset()


def test_one_block_for_one_pass():
    model, lossfunc = extend(net()), extend(loss())
    x, y = data()
    total = combined(model, BatchGrad())

    def passes_twice():
        with total:
            lossfunc(model(x), y).backward()
            with pytest.raises(UsageError, match="once for each backward pass"):
                lossfunc(model(x), y).backward()

    with pytest.raises(UsageError, match="catch errors around the block"):
        passes_twice()  # the values of the first pass are gone


@pytest.mark.parametrize("kind", ["another model", "a copy of the object", "an error"])
def test_a_pass_that_does_not_count_leaves_values_as_they_were(kind: str):
    """Values that the parameters hold are not those of this pass, and are not added again."""
    model, lossfunc = extend(net()), extend(loss("sum"))
    first, second = batches(*data(), 4, 3)
    total = combined(model, DiagGGNExact())
    with total:
        lossfunc(model(first[0]), first[1]).backward()
    before = {name: p.diag_ggn_exact for name, p in model.named_parameters()}
    used, other = total, model
    if kind == "another model":
        other = extend(copy.deepcopy(net()))
    elif kind == "a copy of the object":
        used = copy.deepcopy(total)
    said = "deliberate" if kind == "an error" else "left no value on a parameter of the model"

    def goes_wrong():
        with used:
            lossfunc(other(second[0]), second[1]).backward()
            if kind == "an error":
                raise ArithmeticError("deliberate")

    with pytest.raises((UsageError, ArithmeticError), match=said):
        goes_wrong()
    if kind != "a copy of the object":
        for name, value in before.items():
            assert model.get_parameter(name).diag_ggn_exact is value
    with total:
        lossfunc(model(second[0]), second[1]).backward()
    for (name, field), value in expected([DiagGGNExact()], *data(), "sum").items():
        assert_same(getattr(model.get_parameter(name), field), value)


def test_what_is_kept_of_one_pass_stays():
    model, lossfunc = extend(net()), extend(loss("sum"))
    total, kept = combined(model, DiagGGNExact()), []
    for x, y in batches(*data(), 4, 3):
        with total:
            lossfunc(model(x), y).backward()
            kept.append(model.get_parameter("4.bias").diag_ggn_exact)
    for found, (x, y) in zip(kept, batches(*data(), 4, 3), strict=True):
        assert_same(found, expected([DiagGGNExact()], x, y, "sum")["4.bias", "diag_ggn_exact"])


def test_a_block_inside_of_itself():
    (x, y), (asked,) = data(), [BatchGrad()]
    model, lossfunc = extend(net()), extend(loss())
    total = combined(model, asked)
    with pytest.raises(UsageError, match="entered inside a block of the same"), total, total:
        pass
    with total:
        lossfunc(model(x), y).backward()
    for (name, field), value in expected([asked], x, y).items():
        assert_same(getattr(model.get_parameter(name), field), value)


def test_two_passes_are_refused():
    with pytest.raises(UnsupportedError, match="takes two passes"):
        combined(net(), EKFAC())


SCALE = 1024.0


class OfADegree(FirstOrderExtension):
    """It does not say how its values combine over batches, which scaling need not know."""

    savefield = "of_a_degree"
    degree = 2

    def read(self, product):
        return dense(product).square().sum()


@pytest.mark.parametrize("extension", [*DETERMINISTIC, KFRA, SqrtGGNExact, OfADegree])
def test_unscaled(extension):
    if extension is KFRA:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3)).double()
    else:
        model = net()
    x, y = data()
    model, lossfunc = extend(model), extend(loss())
    values = []
    for factor in (1.0, SCALE):
        value = lossfunc(model(x), y) * factor
        with backpack(extension()):
            value.backward()
        if factor != 1:
            unscale(model, [extension()], SCALE)
        values.append([getattr(p, extension().savefield) for p in model.parameters()])
    assert_same(values[1], values[0])


def test_scalers_and_thresholds():
    model, lossfunc = extend(net()), extend(loss())
    x, y = data()
    values = []
    for factor in (1.0, SCALE):
        value = lossfunc(model(x), y) * factor
        with backpack(ClippedSumGrad(0.01, scale=factor)):
            value.backward()
        values.append([p.grad_clipped for p in model.parameters()])
    assert_same(values[1], values[0])
    with pytest.raises(UsageError, match=r"scale=scaler.get_scale\(\)"):
        unscale(model, [ClippedSumGrad(0.01)], SCALE)
    with pytest.raises(UsageError, match="positive and finite"):
        unscale(model, [Variance()], 0.0)


def test_nothing_is_unscaled_if_one_cannot_be():
    model, lossfunc = extend(net()), extend(loss())
    x, y = data()
    with backpack(KFLR(), GGNGram()):
        lossfunc(model(x), y).backward()
    before = [p.kflr for p in model.parameters()]
    with pytest.raises(UsageError, match="GGNGram holds no tensors"):
        unscale(model, [KFLR(), GGNGram()], SCALE)
    assert all(p.kflr is kept for p, kept in zip(model.parameters(), before, strict=True))


def test_a_scaler():
    model, lossfunc = extend(net()), extend(loss())
    x, y = data()

    class Scaler:
        def get_scale(self) -> float:
            return SCALE

    value = lossfunc(model(x), y) * SCALE
    with backpack(BatchGrad()):
        value.backward()
    unscale(model, BatchGrad(), Scaler())
    for p in model.parameters():
        assert_same(SCALE * p.grad_batch.sum(0), p.grad)


def test_wrong_arguments():
    model, weights = net(), Weights()
    with pytest.raises(TypeError, match="bogus"):
        combined(model, BatchGrad(), bogus=1)
    with pytest.raises(UsageError, match=r"gradient is one of"):
        combined(model, BatchGrad(), gradient="no")
    for wrong in (-1, "mean", len):
        with pytest.raises(UsageError, match="a positive number"):
            combined(model, BatchGrad(), normaliser=wrong)
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        combined(None, BatchGrad())
    with pytest.raises(UsageError, match="takes the observer of the pass"):
        all_reduce(model, [BatchGrad()], None)
    for wrong in (None, BatchGrad, "grad_batch"):
        with pytest.raises(NotAnExtensionError, match="takes extension"):
            all_reduce(model, wrong, weights)
        with pytest.raises(NotAnExtensionError, match="takes extension"):
            unscale(model, wrong, 2.0)
    with pytest.raises(UsageError, match=r"a torch\.amp\.GradScaler, or the scale"):
        unscale(model, BatchGrad(), None)
    with pytest.raises(UsageError, match=r"has grad_batch: call unscale\(\.\.\.\) after"):
        unscale(model, BatchGrad(), 2.0)


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_parameters_that_are_frozen_between_batches(is_frozen_first: bool) -> None:
    """Their sums would lack a batch, and be divided by the samples of all."""
    model, lossfunc = extend(net()), extend(loss())
    total, bias = combined(model, DiagGGNExact()), model.get_parameter("4.bias")
    first, last = batches(*data(), 4, 3)
    for number, (x, y) in enumerate((first, last, first, last)):
        bias.requires_grad_(is_frozen_first == bool(number))
        value = lossfunc(model(x), y)
        if number == 1:
            with pytest.raises(UnsupportedError, match="was frozen in some batches"), total:
                value.backward()
            total.reset()
            continue
        with total:
            value.backward()


def test_a_batch_that_does_not_fit_leaves_the_others_alone() -> None:
    """Nothing of it is added, also where one of two values would fit."""
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.MSELoss(reduction="sum"))
    total = combined(model, SumGradSquared(), SqrtGGNExact())

    def add(*sizes: int) -> None:
        with total:
            lossfunc(model(torch.randn(*sizes, 4)), torch.randn(*sizes, 3)).backward()

    add(2, 5)
    before = model.weight.sum_grad_squared.clone()
    with pytest.raises(ShapeError, match="are joined over batches"):
        add(2, 4)
    x, y = torch.zeros(2, 5, 4), torch.zeros(2, 5, 3)  # a batch without weight gradients
    with total:
        lossfunc(model(x), y).backward()
    assert torch.allclose(model.weight.sum_grad_squared, before)
