"""Modules and users that overwrite what a forward pass saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import (
    OverwrittenInputError,
)
from backpack_core.extensions import KFRA, BatchGrad, DiagGGNExact, DiagHessian
from backpack_core.testing import temporary_plugin
from backpack_products import ParametricRule
from tests.cases import Net, classification


@pytest.mark.parametrize(
    "make",
    [nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Hardswish, nn.SELU, nn.Dropout],
)
def test_in_place_module(make: Any) -> None:
    """Where a derivative needs the overwritten input, autograd's own copy answers."""
    model = nn.Sequential(nn.Linear(3, 4), make(inplace=True), nn.Linear(4, 3))
    problem = classification(model, (3,))
    model.eval()
    problem.check()


def test_in_place_modules_after_functions_and_views() -> None:
    model = Net(
        lambda net, x: net.c(net.silu(net.relu(torch.sin(net.a(x))).view(-1, 4) * 1).flatten(1)),
        a=nn.Linear(3, 4),
        relu=nn.ReLU(inplace=True),
        silu=nn.SiLU(inplace=True),
        c=nn.Linear(4, 3),
    )
    classification(model, (3,)).check()


def test_in_place_addition_of_a_residual() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        branch = net.b(torch.tanh(h))
        branch += h
        return net.c(branch)  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))
    classification(model, (3,)).check()


AXES: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze_": lambda h: h.squeeze_(1),
    "transpose_": lambda h: h.transpose_(0, 1)[0],
    "t_": lambda h: h[:, 0].t_().t_(),
    "twice": lambda h: h.unsqueeze_(0).squeeze_(0).squeeze_(1),
    "and a value": lambda h: h.squeeze_(1).mul_(2),
}


@pytest.mark.parametrize("change", AXES.values(), ids=AXES)
@pytest.mark.parametrize("is_view", [False, True])
def test_axes_that_are_changed_in_place(change: Callable[[Tensor], Tensor], is_view: bool) -> None:
    """The tensor keeps the hooks of its former node, and is the output of a second module."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.b(x.unsqueeze(1)) if is_view else net.b(x).unsqueeze(1) * 1
        return change(h)

    inner = Net(forward, b=nn.Linear(4, 4), unused=nn.Parameter(torch.zeros(())))
    model = nn.Sequential(nn.Linear(3, 4), inner, nn.Linear(4, 3))
    problem = classification(model, (3,))
    inner.unused.requires_grad_(False)
    problem.check()


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.by)


class ShiftRule(ParametricRule):
    module_types = (Shift,)
    params = ("by",)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, view: Any, mat: Tensor) -> Tensor:
        return mat

    def _param_jac_t_mat_prod(self, view: Any, name: str, mat: Tensor) -> Tensor:
        return mat


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("is_used_outside", [False, True])
def test_a_parameter_of_a_module_that_changes_a_view_in_place(
    times: int, is_used_outside: bool
) -> None:
    """It is read once, by the rule or where operations use it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        for _ in range(times):
            h = net.shift(h.view(-1, 4))
        return net.c(h * net.shift.by if is_used_outside else h)  # type: ignore[no-any-return]

    with temporary_plugin(ShiftRule):
        model = Net(forward, a=nn.Linear(3, 4), shift=Shift(), c=nn.Linear(4, 3))
        classification(model, (3,)).check()


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_input_overwritten_before_backward(extension: Any) -> None:
    """Autograd would not notice where the weight is frozen, and is not asked where we notice."""
    problem = classification(nn.Linear(3, 3), (3,))
    loss = problem.loss()
    problem.inputs[0].mul_(2)
    with (
        pytest.raises(OverwrittenInputError, match=r"Linear.*changed in place.*out-of-place"),
        backpack(extension()),
    ):
        loss.backward()


class Turned(nn.Module):
    """Returns a view of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).transpose(1, 2)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("batch", [2, 3])
def test_a_turned_output_of_one_length_is_overwritten(batch: int) -> None:
    """No shape tells the view from what it looks at."""
    inputs, target = torch.randn(batch, 3, 3), torch.randn(batch, 3, 3)
    first, turned = nn.Linear(3, 3), Turned()
    model = extend(nn.Sequential(first, turned))
    with backpack(DiagGGNExact(), check="always"):
        extend(nn.MSELoss(reduction="sum"))(model(inputs).mul_(1.5).sin(), target).backward()

    def output(weight: Tensor) -> Tensor:
        h = torch.nn.functional.linear(inputs, weight, first.bias)
        return (1.5 * (h * turned.weight).transpose(1, 2)).sin()

    jacobian = torch.autograd.functional.jacobian(output, first.weight)
    expected = 2 * jacobian.square().sum((0, 1, 2))
    torch.testing.assert_close(vars(first.weight)["diag_ggn_exact"], expected)


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian, KFRA])
def test_what_autograd_cannot_differentiate_either(extension: Any) -> None:
    """It is the user's slip, and no plugin's."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(net.a(x))
        hidden += x
        output: Tensor = net.b(hidden)
        return output

    problem = classification(Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3)), (3,))
    with pytest.raises(OverwrittenInputError, match=r"Tanh saved was changed.*h = h \+ x"):
        problem.run(extension())
