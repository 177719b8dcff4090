"""Who wants the parameters of modules without a rule, and what they share with layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import AutodiffFallbackWarning, ShapeError, UnsupportedError
from backpack_core.extensions import KFRA, BatchGrad, DiagGGNExact, DiagHessian, SumGradSquared
from tests import oracle
from tests.cases import Net, classification

fallback_is_expected = pytest.mark.filterwarnings(
    "ignore::backpack_core.errors.AutodiffFallbackWarning"
)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x * self.w)


class OtherUse(nn.Module):
    """The weight of another module, transposed."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.tied = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.tied)


@fallback_is_expected
@pytest.mark.parametrize("gradient", ["autograd", "shared", "none"])
def test_parameter_that_a_layer_uses_too(gradient: Any) -> None:
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.Tanh(), OtherUse(first.weight), nn.Linear(3, 3))
    problem = classification(model, (3,))
    for _ in range(3):
        problem.run(BatchGrad(), DiagGGNExact(), gradient=gradient)
        problem.compare("grad_batch", problem.expected(oracle.individual_gradients))
        problem.compare(
            "diag_ggn_exact", [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
        )
        if gradient != "none":
            problem.compare("grad", [g.sum(0) for g in problem.fields("grad_batch")])


def test_parameter_that_is_left_out_is_so_at_every_use() -> None:
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.Tanh(), OtherUse(first.weight), nn.Linear(3, 3))
    problem = classification(model, (3,))
    for gradient in ("autograd", "shared", "shared", "shared"):
        problem.run(BatchGrad(fail_mode="silent"), gradient=gradient)
        assert not hasattr(first.weight, "grad_batch")
        gradients = [g.sum(0) for g in problem.expected(oracle.individual_gradients)]
        problem.compare("grad", gradients)


@fallback_is_expected
def test_one_extension_wants_what_another_leaves_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 3))
    problem = classification(model, (3,))
    problem.run(BatchGrad(fail_mode="silent"), SumGradSquared(), DiagHessian(fail_mode="silent"))
    gradients = problem.expected(oracle.individual_gradients)
    problem.compare("sum_grad_squared", [g.square().sum(0) for g in gradients])
    for field in ("grad_batch", "diag_h"):
        assert [hasattr(p, field) for p in problem.parameters] == [True, True, False, True, True]


@pytest.mark.parametrize("gradient", ["autograd", "shared"])
def test_curvature_that_needs_a_rule(gradient: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 3))
    message = "No layer rule covers 'w' of Scale '1', so KFRA"
    with (
        pytest.warns(AutodiffFallbackWarning),
        pytest.raises(UnsupportedError, match=message) as error,
    ):
        classification(model, (3,)).run(KFRA(), gradient=gradient)
    assert "Write a layer rule" in str(error.value)


@fallback_is_expected
def test_parameter_that_is_not_used_has_neither_gradient_nor_quantity() -> None:
    class Partly(Scale):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    partly = Partly()
    classification(nn.Sequential(nn.Linear(3, 4), partly, nn.Linear(4, 3)), (3,)).run(BatchGrad())
    assert hasattr(partly.w, "grad_batch")
    assert partly.other.grad is None
    assert not hasattr(partly.other, "grad_batch")


@pytest.mark.parametrize("rows", [1, 5])
def test_a_parameter_that_a_layer_was_given_as_an_argument(rows: int) -> None:
    """It belongs to no layer, also if it has as many rows as there are samples."""
    table = nn.Parameter(torch.randn(rows, 4))
    parts = {"a": nn.Linear(3, 4), "squash": nn.Sigmoid(), "c": nn.Linear(4, 3)}
    model = Net(lambda net, x: net.c(net.a(x) + net.squash(net.table)), table=table, **parts)
    with pytest.raises((UnsupportedError, ShapeError)):
        classification(model, (3,), batch=5).run(KFRA())


@pytest.mark.parametrize("gradient", ["autograd", "none", "skipped"])
def test_entries_that_were_picked_where_the_pass_does_not_go(gradient: Any) -> None:
    """The gates of a recurrent layer of one step are picked from one tensor."""
    cell, head = nn.GRU(3, 2, batch_first=True), nn.Linear(2, 2)
    net = Net(lambda net, x: net.head(net.cell(x)[0]), cell=cell, head=head)
    model, x = extend(net), torch.rand(4, 1, 3)
    with backpack(BatchGrad(), gradient=gradient):
        model(x).square().sum().backward()
    for n, sample in enumerate(x):
        own = torch.autograd.grad(model(sample[None]).square().sum(), list(model.parameters()))
        for parameter, expected in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(parameter.grad_batch[n], expected)
