"""Clipped sums: norms over all parameters or by layer, and what is kept until the pass ends."""

from __future__ import annotations

import gc
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import BatchGrad, ClippedSumGrad
from backpack_firstorder import clipping
from backpack_products.product import DenseProduct
from tests.cases import Problem
from tests.firstorder.problems import NETS, gradients, make
from tests.leftovers import live_calls
from tests.oracle import assert_close


def own(problem: Problem) -> list[Tensor]:
    """The gradients of the samples' own losses, whatever the reduction."""
    reduction, problem.lossfunc.reduction = problem.lossfunc.reduction, "sum"
    found = gradients(problem)
    problem.lossfunc.reduction = reduction
    return found


def clipped(grads: list[Tensor], groups: list[int], bound: float) -> list[Tensor]:
    """The clipped sums; parameters with the same number share a norm."""
    squares: dict[int, Tensor] = {}
    for g, group in zip(grads, groups, strict=True):
        norms = g.flatten(1).square().sum(1)
        squares[group] = squares[group] + norms if group in squares else norms
    sums = []
    for g, group in zip(grads, groups, strict=True):
        factors = [bound / max(bound, float(square) ** 0.5) for square in squares[group]]
        sums.append(sum(factor * row for factor, row in zip(factors, g, strict=True)))
    return sums


def middle(grads: list[Tensor]) -> float:
    """A bound that clips some samples and not others."""
    return float(sum(g.flatten(1).square().sum(1) for g in grads).sqrt().median())


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_flat(net: str, reduction: str) -> None:
    problem = make(net, reduction=reduction)
    grads = own(problem)
    bound = middle(grads)
    problem.run(ClippedSumGrad(bound), BatchGrad())
    expected = clipped(grads, [0] * len(grads), bound)
    problem.compare("grad_clipped", expected)
    total = [g.sum(0) for g in grads]
    assert any(not torch.allclose(a, b) for a, b in zip(expected, total, strict=True))


@pytest.mark.parametrize("net", ["mlp", "convolutions", "attention"])
def test_per_layer(net: str) -> None:
    problem = make(net)
    grads = own(problem)
    layers = [
        layer
        for layer, module in enumerate(problem.model.modules())
        for p in module._parameters.values()
        if p is not None
    ]
    if net == "attention":  # the rule of attention covers its output projection
        layers = [layers[0]] * 4 + layers[4:]
    bound = 0.7 * middle(grads)
    problem.run(ClippedSumGrad(bound, clipping="per_layer"))
    problem.compare("grad_clipped", clipped(grads, layers, bound))


@pytest.mark.parametrize("small", [0, 2**12])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("clipping_", ["flat", "per_layer"])
def test_norms_of_any_size(
    small: int, scale: float, clipping_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision, where squares leave the range of numbers; one sample has none."""
    monkeypatch.setattr(clipping, "_SMALL", small)
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Flatten(), nn.Linear(30, 2)
    model, x = nn.Sequential(*layers).float(), torch.randn(5, 5, 4, dtype=torch.float32)
    factors = torch.tensor([1.0, 2.0, 0.0, 3.0, 0.5]).double()
    double = deepcopy(model).double()
    grads = [torch.zeros(5, *p.shape, dtype=torch.double) for p in double.parameters()]
    for n in range(5):
        loss = factors[n] * double(x[n : n + 1].double()).square().sum() / 2
        for stored, g in zip(grads, torch.autograd.grad(loss, [*double.parameters()]), strict=True):
            stored[n] = g
    groups = [0] * 6 if clipping_ == "flat" else [0, 0, 1, 1, 2, 2]
    bound = middle(grads)
    loss = (extend(model)(x).square().sum(1) * factors.float()).sum() / 2 * scale
    with backpack(ClippedSumGrad(bound * scale, clipping=clipping_, normaliser=None)):
        loss.backward()
    for p, expected in zip(model.parameters(), clipped(grads, groups, bound), strict=True):
        assert_close(p.grad_clipped.double() / scale, expected, rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e15, 1e18, 6e21, 1e25, 1e37])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(50, 30), lambda: nn.Conv1d(5, 5, 3)])
def test_no_sample_exceeds_the_bound_or_is_left_out_at_the_end_of_the_range(
    layer: Any, size: float
) -> None:
    """A weight of 10⁻⁴⁵ would be rounded up, or to zero; gradients that overflow have norm ∞."""
    model = extend(layer().float())
    shape = (50,) if isinstance(model, nn.Linear) else (5, 10)
    x = size * torch.randn(1, *shape, dtype=torch.float32)
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    with backpack(ClippedSumGrad(1.0)):
        out = model(x)
        lossfunc(out, torch.zeros_like(out)).backward()
    total = torch.cat([p.grad_clipped.flatten().double() for p in model.parameters()])
    assert float(total.norm()) == pytest.approx(1.0, rel=1e-5) or bool(total.isnan().any())
    assert size > 1e18 or bool(total.isfinite().all())


FORMS = {"kept": 0.0, "contracted": 1e9}  # what it costs to write what is kept


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("net", ["convolutions", "attention"])
def test_kept_or_formed_again(net: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Individual gradients are kept where that costs less, and weighted."""
    monkeypatch.setattr(clipping, "WRITE", FORMS[form])
    monkeypatch.setattr(clipping, "READ", 0)
    handles = []
    read = ClippedSumGrad.read

    def watched(self: ClippedSumGrad, product: Any) -> Any:
        handles.append(read(self, product))
        return handles[-1]

    monkeypatch.setattr(ClippedSumGrad, "read", watched)
    problem = make(net)
    grads = own(problem)
    problem.run(ClippedSumGrad(middle(grads)))
    problem.compare("grad_clipped", clipped(grads, [0] * len(grads), middle(grads)))
    weights = [h.product for h in handles if getattr(h.product, "inp", None) is not None]
    shared = [p for p in weights if getattr(p, "positions", 1) > 1]
    assert bool(shared) == (form == "contracted")


@pytest.mark.parametrize(("positions", "width", "is_kept"), [(50, 5, True), (50, 200, False)])
def test_what_is_kept_takes_no_more_memory(
    positions: int, width: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formed gradients are kept in the place of the factors, not beside more of them."""
    for constant in ("WRITE", "READ"):
        monkeypatch.setattr(clipping, constant, 0)
    model, extension = extend(nn.Linear(width, width, bias=False)), ClippedSumGrad(1.0)
    kept: list[Any] = []
    finish = extension.finish
    monkeypatch.setattr(extension, "finish", lambda v, n: kept.extend(v.values()) or finish(v, n))
    lossfunc = extend(nn.MSELoss())
    x = torch.randn(3, positions, width)
    with backpack(extension):
        lossfunc(model(x), x).backward()
    assert isinstance(kept[0].product, DenseProduct) is is_kept


def test_can_be_sent_to_another_process() -> None:
    extension = pickle.loads(pickle.dumps(ClippedSumGrad(2.0)))
    assert extension.max_norm == 2.0


def test_subsampling() -> None:
    problem = make("convolutions")
    grads = [g[[3, 0]] for g in own(problem)]
    problem.run(ClippedSumGrad(middle(grads), subsampling=[3, 0]))
    problem.compare("grad_clipped", clipped(grads, [0] * len(grads), middle(grads)))


def test_a_gradient_of_zero_is_left_alone() -> None:
    problem = make("mlp", reduction="sum")
    problem.lossfunc = nn.CrossEntropyLoss(reduction="sum", ignore_index=1)
    problem.target[:] = 1
    problem.run(ClippedSumGrad(1.0))
    for field in problem.fields("grad_clipped"):
        assert not field.any()


def test_nothing_is_kept_after_the_pass() -> None:
    problem = make("convolutions")
    extension = ClippedSumGrad(1.0)
    gc.collect()
    before = live_calls()
    problem.run(extension)
    gc.collect()
    assert live_calls() == before
    assert not any(isinstance(value, dict) and value for value in vars(extension).values())


def test_a_failed_pass_stores_nothing() -> None:
    problem = make("mlp")

    def fail(module: nn.Module) -> None:
        if isinstance(module, nn.Sigmoid):
            raise RuntimeError("stop")

    loss = problem.loss()
    with (
        pytest.raises(RuntimeError, match="stop"),
        backpack(ClippedSumGrad(1.0), extension_hook=fail),
    ):
        loss.backward()
    assert not any(hasattr(p, "grad_clipped") for p in problem.parameters)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_refuses_a_bound_that_is_not_positive(bound: float) -> None:
    with pytest.raises(UsageError, match="max_norm"):
        ClippedSumGrad(bound)


def test_refuses_an_unknown_kind() -> None:
    with pytest.raises(UsageError, match="clipping"):
        ClippedSumGrad(1.0, clipping="global")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["1", None, True, torch.ones(2)])
def test_bounds_and_scales_are_numbers(wrong: Any) -> None:
    with pytest.raises(UsageError, match="max_norm must be a positive number"):
        ClippedSumGrad(wrong)
    with pytest.raises(UsageError, match="scale must be a positive and finite number"):
        ClippedSumGrad(1.0, scale=wrong)
    assert ClippedSumGrad(torch.tensor(2.0), scale=torch.tensor(4.0)).max_norm == 2.0
