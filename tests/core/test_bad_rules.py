"""Modules without a rule, and what rules and extensions return: errors say who and where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backpack_core import (
    ElementwiseRule,
    FirstOrderExtension,
    ParametricRule,
    SampleProduct,
    View,
)
from backpack_core.errors import (
    BackpackError,
    BackpackWarning,
    MissingPluginError,
    PluginCodeError,
    ShapeError,
)
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.testing import temporary_plugin
from tests.cases import classification


class Shift(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.shift)


def test_fail_mode_error() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with pytest.raises(MissingPluginError) as error:
        problem.run(BatchGrad(fail_mode="error"))
    for word in (
        "Shift '1'",
        "fail_mode is 'error'",
        "write a layer rule",
        "BatchGrad of backpack",
    ):
        assert word in str(error.value)


def test_fail_mode_warning() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with pytest.warns(
        BackpackWarning, match=r"Shift '1' has no layer rule: BatchGrad leaves it out"
    ):
        problem.run(BatchGrad(fail_mode="warning"))
    assert not hasattr(problem.parameters[2], "grad_batch")
    assert hasattr(problem.parameters[0], "grad_batch")


def test_fail_mode_silent() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    problem.run(DiagGGNExact(fail_mode="silent"))
    assert not hasattr(problem.parameters[2], "diag_ggn_exact")
    assert hasattr(problem.parameters[0], "diag_ggn_exact")


# What plugins return.


class BadShift(ParametricRule):
    module_types = (Shift,)
    params = ("shift",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat.sum(1)


def test_wrong_shape_at_a_parameter() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with temporary_plugin(BadShift), pytest.raises(ShapeError) as error:
        problem.run(BatchGrad())
    for word in ("BadShift._param_jac_t_mat_prod", "[1, 3]", "[1, 3, 3]", "'shift'", "Shift '1'"):
        assert word in str(error.value)
    assert "BatchGrad of backpack-plugin-firstorder" in str(error.value)


def test_rule_without_second_derivative() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    class SineRule(ElementwiseRule):
        module_types = (Sine,)

        def derivative(self, view: View) -> Tensor:
            return torch.cos(view.input)

    with temporary_plugin(SineRule):
        problem = classification(nn.Sequential(nn.Linear(3, 3), Sine(), nn.Linear(3, 3)), (3,))
        problem.check()


class Impatient(FirstOrderExtension):
    """Fails with an error of its own."""

    savefield = "impatient"

    def read(self, product: SampleProduct) -> Tensor:
        raise ZeroDivisionError("on purpose")


def test_errors_say_where_they_happened() -> None:
    problem = classification(nn.Sequential(nn.Sequential(nn.Linear(3, 3))), (3,))
    with pytest.raises(PluginCodeError, match="ZeroDivisionError: on purpose") as error:
        problem.run(Impatient())
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert f"{__file__}:" in str(error.value)
    where = error.value.backpack_context
    for word in ("Impatient", "Linear '0.0'", "LinearRule of backpack-plugin-layers"):
        assert word in where


def test_all_errors_are_of_one_tree() -> None:
    from backpack_core import errors

    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) > 10
    for kind in kinds:
        assert issubclass(kind, (BackpackError, BackpackWarning))
        assert kind is BackpackError or kind is BackpackWarning or len(kind.__mro__) > 3
