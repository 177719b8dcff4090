"""Rules that are broken on purpose: the kit names the fault each time."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import LayerRule, View, ops
from backpack_core.testing import RuleCase, check_rule
from tests.kit.layers import (
    Centre,
    Cube,
    CubeRule,
    Gain,
    GainRule,
    Grouped,
    GroupedRule,
    case_of,
)


class WrongSign(GainRule):
    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return -super()._jac_t_mat_prod(call, mat)


class ForgottenGroup(GroupedRule):
    def affine_input(self, call: ModuleCall) -> Tensor:
        first = super().affine_input(call)[:, :, :1]
        return first.expand(-1, -1, 2, -1)


class MissingBatchSum(GainRule):
    """Its fast version of a sum over samples takes the first sample."""


@ops.per_sample_sum.register
def per_sample_sum_of_one(
    rule: MissingBatchSum, call: ModuleCall, name: str, mat: Tensor
) -> Tensor:
    return rule.param_jac_t_mat_prod(call, name, mat)[:, 0]


class MissingColumnSum(GainRule):
    """Its fast version of a square sum leaves out all columns but the first."""


@ops.square_sum.register
def square_sum_of_one(rule: MissingColumnSum, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    return rule.param_jac_t_mat_prod(call, name, mat)[0].square().sum(0)


class FalseZeroHessian(CubeRule):
    hessian_is_zero = True


class FalseConstantJacobian(CubeRule):
    jacobian_is_constant = True


class ScaleOfEach(Module):
    """``y = s x``, with a constant for each sample: linear, but of several Jacobians."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(1.0, 2.0, len(x)).unsqueeze(1)


class OneJacobianOfSeveral(LayerRule):
    module_types = (ScaleOfEach,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        scale = torch.linspace(1.0, 2.0, call.full.batch_size).unsqueeze(1)
        return mat * (scale if call.indices is None else scale[list(call.indices)])


class ScaleByTheBatch(Module):
    """``y = s(Σ x) x``, with a step function: one Jacobian for all samples, not for all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.detach().sum() * 100).round().remainder(7)


class OneJacobianHere(LayerRule):
    module_types = (ScaleByTheBatch,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return mat * (call.full.inputs[0].detach().sum() * 100).round().remainder(7)


class FalseLinearity(GainRule):
    linear_in_params = ("weight", "slope")


class Leak(GainRule):
    """Keeps every call it sees."""

    seen: ClassVar[list[ModuleCall]] = []

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        self.seen.append(call)
        return super()._param_jac_t_mat_prod(call, name, mat)


class State(GainRule):
    def check(self, call: ModuleCall) -> None:
        self.last = call


class WritesToColumns(GainRule):
    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return mat.mul_(call.parameter("weight"))


class UndeclaredMixing(LayerRule):
    module_types = (Centre,)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return mat - mat.mean(1, keepdim=True)


class WrongSecondDerivative(CubeRule):
    def second_derivative(self, call: ModuleCall) -> Tensor:
        return 3 * call.input


# Rule, the check that must name the fault, and what its message must say.
FAULTS = [
    (case_of(Gain, WrongSign), "jac_t_mat_prod", "wrong sign"),
    (case_of(Grouped, ForgottenGroup), "affine_form", "W x \\+ b"),
    (case_of(Grouped, ForgottenGroup), "param_jac_t_mat_prod", "'weight'"),
    (case_of(Gain, MissingBatchSum), "param_jac_batch_sum", "per_sample_sum"),
    (case_of(Gain, MissingColumnSum), "operations", "ops.square_sum"),
    (case_of(Cube, FalseZeroHessian), "hessian_is_zero", "does not vanish"),
    (case_of(Cube, FalseConstantJacobian), "jacobian_is_constant", "mat, input 0, the layer's"),
    (case_of(ScaleOfEach, OneJacobianOfSeveral), "jacobian_is_constant", "mat, input 0"),
    (case_of(ScaleByTheBatch, OneJacobianHere), "jacobian_is_constant", "at another input"),
    (case_of(Gain, FalseLinearity), "linear_in_params", "slope"),
    (case_of(Gain, Leak), "no_live_calls", "outlive their graph"),
    (case_of(Gain, State), "accepts", "keep no state"),
    (case_of(Gain, WritesToColumns), "leaves_arguments_alone", "wrote to a tensor"),
    (case_of(Centre, UndeclaredMixing), "mixes_samples", "influence each other"),
    (case_of(Cube, WrongSecondDerivative), "second_derivative", "0.5 times"),
    (case_of(Cube, WrongSecondDerivative), "extensions_mean", "DiagHessian"),
]


@pytest.mark.parametrize(
    ("case", "check", "message"), FAULTS, ids=[f"{c.rule.__name__}-{n}" for c, n, _ in FAULTS]
)
def test_the_fault_is_named(case: RuleCase, check: str, message: str) -> None:
    found = {result.check: result for result in check_rule(case)}
    assert found[check].status == "failed"
    assert_matches(message, found[check].message)
    Leak.seen.clear()


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text), text


@pytest.mark.parametrize(
    "case", [case_of(Gain, GainRule), case_of(Grouped, GroupedRule), case_of(Cube, CubeRule)]
)
def test_right_rules_pass(case: RuleCase) -> None:
    results = check_rule(case)
    assert [r for r in results if not r.ok] == []
    assert len(results) > 25


def test_unnecessary_work_is_not_promised() -> None:
    names = {result.check for result in check_rule(case_of(Gain, GainRule))}
    assert "hessian_is_diagonal" not in names
    assert "affine_form" not in names
    assert "hessian_is_zero" in names


@pytest.mark.parametrize("strides", [True, False])
def test_comparer_knows_simple_mistakes(strides: bool) -> None:
    from backpack_core.testing.compare import CheckFailure, close

    expected = torch.arange(1.0, 5.0).reshape(2, 2)
    found = (2 * expected).T.contiguous().T if strides else 2 * expected
    with pytest.raises(CheckFailure, match="2 times the right value"):
        close(found, expected, "x", 1e-10)
    with pytest.raises(CheckFailure, match="finite"):
        close(expected / 0, expected, "x", 1e-10)
    with pytest.raises(CheckFailure, match="shape"):
        close(expected.sum(0), expected, "x", 1e-10)
