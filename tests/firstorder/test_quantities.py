"""Every first-order quantity on every kind of net, against individual gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from backpack_core import backpack
from backpack_core.extensions import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    SumGradSquared,
    Variance,
)
from backpack_products.extensions import FirstOrderExtension
from backpack_products.tuning import memory_budget, set_memory_budget
from tests.firstorder.problems import NETS, gradients, make


def _variance(g: Tensor) -> Tensor:
    return g.square().mean(0) - g.mean(0).square()


# Of the individual gradients [N, *θ].
QUANTITIES: dict[type[FirstOrderExtension], Callable[[Tensor], Tensor]] = {
    BatchGrad: lambda g: g,
    BatchL2Grad: lambda g: g.flatten(1).square().sum(1),
    SumGradSquared: lambda g: g.square().sum(0),
    Variance: _variance,
    BatchDotGrad: lambda g: g.flatten(1) @ g.flatten(1).T,
}
each_quantity = pytest.mark.parametrize("kind", QUANTITIES, ids=lambda kind: kind.__name__)
each_net = pytest.mark.parametrize("net", NETS)


def check(
    net: str,
    kinds: Sequence[type[FirstOrderExtension]],
    batch: int = 5,
    reduction: str = "mean",
    subsampling: list[int] | None = None,
) -> None:
    """Run extensions in one backward pass and compare every field with the oracle."""
    problem = make(net, batch, reduction)
    expected = gradients(problem)
    problem.run(*(kind(subsampling=subsampling) for kind in kinds))
    rows = range(batch) if subsampling is None else subsampling
    for kind in kinds:
        problem.compare(kind.savefield, [QUANTITIES[kind](g[list(rows)]) for g in expected])


@each_net
@each_quantity
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_alone(net: str, kind: type[FirstOrderExtension], reduction: str) -> None:
    check(net, [kind], reduction=reduction)


@each_net
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_sample(net: str, reduction: str) -> None:
    # A variance of one sample is rounding: test_one_sample_has_no_variance.
    check(net, [kind for kind in QUANTITIES if kind is not Variance], 1, reduction)


@each_net
def test_subsampling(net: str) -> None:
    check(net, list(QUANTITIES), subsampling=[4, 1, 2])


@each_net
def test_together(net: str) -> None:
    check(net, list(QUANTITIES))
    check(net, list(reversed(QUANTITIES)))


@each_net
@each_quantity
def test_tiny_budget(net: str, kind: type[FirstOrderExtension]) -> None:
    before = memory_budget()
    set_memory_budget(64)
    try:
        check(net, [kind])
    finally:
        set_memory_budget(before)


@pytest.mark.parametrize("net", ["mlp", "convolutions"])
def test_one_sample_has_no_variance(net: str) -> None:
    problem = make(net, 1)
    problem.run(Variance())
    for parameter in problem.parameters:
        scale = parameter.grad.square().max()  # type: ignore[union-attr]
        assert bool((parameter.variance.abs() <= 1e-14 * scale).all())  # type: ignore[attr-defined]


@each_net
@each_quantity
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_differentiable(net: str, kind: type[FirstOrderExtension]) -> None:
    """With ``create_graph=True`` a quantity is a function of the parameters."""
    problem = make(net)
    problem.model.zero_grad()
    loss = problem.loss()
    with backpack(kind()):
        loss.backward(create_graph=True)
    total = sum(field.sum() for field in problem.fields(kind.savefield))
    first = problem.parameters[0]
    (found,) = torch.autograd.grad(total, first, materialize_grads=True)
    for parameter in problem.parameters:
        parameter.grad = None

    step, entry = 1e-5, (0,) * first.dim()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            first[entry] += sign * step
        problem.run(kind())
        values.append(sum(float(field.sum()) for field in problem.fields(kind.savefield)))
        with torch.no_grad():
            first[entry] -= sign * step
    slope = (values[0] - values[1]) / (2 * step)
    assert abs(float(found[entry]) - slope) < 1e-6 * max(1.0, abs(slope))
