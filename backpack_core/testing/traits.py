"""The traits of a case, which decide what checks apply: declared, never guessed."""

from __future__ import annotations

import inspect
from functools import cache

import torch

from backpack_core.contract.rules import LayerRule
from backpack_core.record.switch import disable
from backpack_core.testing.cases import Case, ExtensionCase, RuleCase, installed
from backpack_core.testing.execution import Execution, shared_execution
from backpack_products.derivatives import SecondOrderRule, second_order
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
    rule, case = run.rule, run.case
    separate = not rule.mixes_samples(run.view)
    propagates = not rule.transparent and 0 in run.live
    linear = getattr(rule, "linear_in_params", ())
    found = {
        "separate": separate,
        "mixing": not separate,
        "twice": case.twice_differentiable,
        "once": not case.twice_differentiable,
        "kept": not case.overwrites_input,
        "overwritten": case.overwrites_input,
        "input": propagates,
        "zero hessian": propagates and second_order(rule).hessian_is_zero,
        "constant jacobian": propagates and second_order(rule).jacobian_is_constant,
        "diagonal hessian": propagates and second_order(rule).hessian_is_diagonal,
        "second derivative": propagates and has_second_derivative(rule),
        "elementwise": propagates and isinstance(rule, ElementwiseRule),
        "parameters": bool(run.parameters),
        "several parameters": len(run.parameters) > 1,
        "linear parameters": any(name in run.parameters for name in linear),
        "affine": bool(run.parameters) and isinstance(rule, AffineRule),
        "half precision": _runs_in_half(case),
        "batch first": separate and run.batch_axis == 0,
    }
    return {name for name, has in found.items() if has}


def _runs_in_half(case: RuleCase) -> bool:
    """Whether the layer itself runs in half precision, for which torch lacks some operations."""
    try:
        with disable(), torch.no_grad():
            case.arguments(dtype=torch.bfloat16).call(case.module(torch.bfloat16))
    except RuntimeError:
        return False
    return True


def has_second_derivative(rule: LayerRule) -> bool:
    """Whether a rule implements its second derivative."""
    if not isinstance(rule, SecondOrderRule) or rule.hessian_is_zero:
        return isinstance(rule, SecondOrderRule)
    if isinstance(rule, ElementwiseRule):
        return type(rule).second_derivative is not ElementwiseRule.second_derivative
    its = type(rule)._second_derivative_mat_prod
    return its is not SecondOrderRule._second_derivative_mat_prod
