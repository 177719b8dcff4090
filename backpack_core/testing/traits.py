"""The traits of a case, which decide what checks apply: declared, never guessed."""

from __future__ import annotations

import inspect
from functools import cache

import torch

from backpack_core.contract.rules import LayerRule
from backpack_core.record.switch import disable
from backpack_core.testing.cases import (
    FORWARD,
    Case,
    ExtensionCase,
    RuleCase,
    installed,
    seeded,
)
from backpack_core.testing.execution import Execution, shared_execution
from backpack_products.elementwise import ElementwiseRule
from backpack_products.parametric import AffineRule


@cache
def traits(case: Case) -> frozenset[str]:
    """Everything a check may need that this case has."""
    if isinstance(case, RuleCase):
        with installed(case.rule):
            return frozenset(_of_execution(shared_execution(case)))
    if isinstance(case, ExtensionCase):
        arguments = inspect.signature(case.extension_factory).parameters
        return frozenset({"subsampling", "savefield"} & set(arguments))
    return frozenset()


def _of_execution(run: Execution) -> set[str]:
    rule = run.rule
    found = {"mixing" if rule.mixes_samples(run.view) else "separate"}
    found.add("twice" if run.case.twice_differentiable else "once")
    found.add("overwritten" if run.case.overwrites_input else "kept")
    propagates = not rule.transparent and bool(run.leaves) and run.leaves[0] is not None
    if propagates:
        found.add("input")
        if rule.hessian_is_zero:
            found.add("zero hessian")
        if rule.jacobian_is_constant:
            found.add("constant jacobian")
        if rule.hessian_is_diagonal:
            found.add("diagonal hessian")
        if has_second_derivative(rule):
            found.add("second derivative")
        if isinstance(rule, ElementwiseRule):
            found.add("elementwise")
    if run.parameters:
        found.add("parameters")
        if len(run.parameters) > 1:
            found.add("several parameters")
        if any(name in run.parameters for name in getattr(rule, "linear_in_params", ())):
            found.add("linear parameters")
        if isinstance(rule, AffineRule):
            found.add("affine")
    if _runs_in_half(run.case):
        found.add("half precision")
    if run.batch_axis == 0 and "separate" in found:
        found.add("batch first")
    return found


def _runs_in_half(case: RuleCase) -> bool:
    """Whether the layer itself runs in half precision, for which torch lacks some operations."""
    arguments = case.arguments(dtype=torch.bfloat16)
    try:
        with disable(), torch.no_grad():
            seeded(
                lambda: case.module(torch.bfloat16)(*arguments.args, **arguments.kwargs), FORWARD
            )
    except RuntimeError:
        return False
    return True


def has_second_derivative(rule: LayerRule) -> bool:
    """Whether a rule implements its second derivative."""
    if rule.hessian_is_zero:
        return True
    if isinstance(rule, ElementwiseRule):
        return type(rule).second_derivative is not ElementwiseRule.second_derivative
    return type(rule)._second_derivative_mat_prod is not LayerRule._second_derivative_mat_prod
