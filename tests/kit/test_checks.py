"""The list of checks and their results: names, strictness, and that nothing vanishes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from backpack_core.errors import UsageError
from backpack_core.extensions import BatchGrad
from backpack_core.testing import (
    ExtensionCase,
    LossCase,
    Quantity,
    RuleCase,
    check_extension,
    check_loss,
    check_rule,
    parametrize_rule_checks,
)
from backpack_core.testing import traits as traits_module
from backpack_core.testing.checks import CHECKS
from tests.kit.layers import Gain, GainRule, case_of
from tests.kit.test_faults import WrongSign

NAMES = {
    "rule": """
        extensions_mean extensions_sum batch_of_one subsampling frozen_layer
        frozen_surroundings partly_frozen float32 bfloat16 autocast retain_graph called_twice
        deepcopy pickle no_live_calls mixing_is_refused not_twice_differentiable overwritten_input
        derivative second_derivative second_derivative_mat_prod hessian_is_zero
        hessian_is_diagonal jacobian_is_constant linear_in_params mixes_samples affine_form
        affine_weight accepts jac_t_mat_prod jac_mat_prod jac_adjoint param_jac_t_mat_prod
        param_jac_mat_prod param_jac_adjoint param_jac_batch_sum operations subsampled_call
        leaves_arguments_alone non_contiguous_columns non_contiguous_input
        other_mode keeps_dtype changed_since
    """,
    "loss": """
        sqrt_hessian_mean sqrt_hessian_sampled_mean hessian_mat_prod_mean sum_hessian_mean
        arriving_gradient_mean started_extensions_mean sqrt_hessian_sum
        sqrt_hessian_sampled_sum hessian_mat_prod_sum sum_hessian_sum arriving_gradient_sum
        started_extensions_sum normalisation hessian_is_psd samples_are_separate loss_batch_of_one
        loss_subsampled_call loss_non_contiguous_input loss_float32
        loss_leaves_arguments_alone unreduced
    """,
    "extension": """
        value_mean value_sum value_batch_of_one value_of_no_samples value_in_chunks
        value_loss_scaled value_residual
        value_shared_positions value_single_number value_overwritten value_frozen value_called_twice
        value_float32
        value_subsampling beside_others savefield leaves_gradient_alone pickle_extension
        extension_no_live_calls degree two_halves_mean two_halves_sum samples_add
        declarations
        value_partly_frozen value_bfloat16
    """,
}


def test_no_check_vanishes() -> None:
    found = {kind: [check.name for check in checks] for kind, checks in CHECKS.items()}
    assert found == {kind: names.split() for kind, names in NAMES.items()}
    assert all(len(set(names)) == len(names) for names in found.values())


def test_needs_are_traits() -> None:
    """A trait that no case can have would switch a check off."""
    needed = {need for checks in CHECKS.values() for check in checks for need in check.needs}
    assert needed <= known_traits()


def known_traits() -> set[str]:
    """The words in quotes in the module that finds them."""
    tree = ast.parse(inspect.getsource(traits_module))
    return {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_results_are_structured() -> None:
    results = check_rule(case_of(Gain, WrongSign, name="gain"), ["jac_t_mat_prod", "accepts"])
    assert [(r.case, r.check, r.status, r.ok) for r in results] == [
        ("gain", "jac_t_mat_prod", "failed", False),
        ("gain", "accepts", "passed", True),
    ]


def test_expected_failures_are_strict() -> None:
    declared = {"jac_t_mat_prod": "known", "accepts": "not true"}
    case = case_of(Gain, WrongSign, expected_failures=declared)
    found = {r.check: r for r in check_rule(case, declared)}
    assert found["jac_t_mat_prod"].status == "expected failure"
    assert found["jac_t_mat_prod"].message == "known"
    assert found["accepts"].status == "unexpected pass"
    assert not found["accepts"].ok


def test_expected_failures_must_name_a_check_of_the_case() -> None:
    with pytest.raises(UsageError, match="affine_form"):
        check_rule(case_of(Gain, GainRule, expected_failures={"affine_form": "no"}))


def test_a_check_that_is_asked_for_must_exist() -> None:
    with pytest.raises(UsageError, match="nonsense"):
        check_rule(case_of(Gain, GainRule), ["nonsense"])


def test_no_cases_and_wrong_cases_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing would be checked"):
        parametrize_rule_checks([])
    with pytest.raises(UsageError, match="RuleCase"):
        parametrize_rule_checks([LossCase(nn.MSELoss, lambda n: torch.randn(n, 2))])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="'check'"):
        parametrize_rule_checks([case_of(Gain, GainRule)])(lambda: None)


def test_a_layer_without_a_rule_cannot_be_checked() -> None:
    with pytest.raises(UsageError, match="No rule speaks for Gain"):
        check_rule(RuleCase(Gain, lambda n: torch.randn(n, 4)))


def test_losses_and_extensions_have_results_too() -> None:
    loss = LossCase(nn.MSELoss, lambda n: (torch.randn(n, 2), torch.randn(n, 2)))
    assert all(result.ok for result in check_loss(loss))
    from backpack_core.extensions import BatchGrad

    results = check_extension(ExtensionCase(BatchGrad))
    assert len(results) == len(CHECKS["extension"])
    assert all(result.ok for result in results)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RuleCase(Gain(), torch.randn), "module_factory is a class or function"),
        (lambda: RuleCase(lambda: Gain(), torch.ones(3)), "input_factory is a class or function"),
        (lambda: RuleCase(lambda: Gain(), torch.randn, rule=GainRule()), "rule is a class"),
        (lambda: LossCase(nn.MSELoss(), torch.randn), "loss_factory is a class or function"),
        (lambda: ExtensionCase(BatchGrad()), "extension_factory is a class or function"),
        (lambda: ExtensionCase(BatchGrad, lambda r, name: r), "quantity is a Quantity"),
        (lambda: Quantity(lambda r, name: r, needs="curvatur"), "needs must be one of"),
        (lambda: Quantity(1), "takes a function of reference and name"),
        (lambda: check_rule(GainRule), "One case is checked at a time"),
        (lambda: check_rule([case_of(Gain, GainRule)]), "One case is checked at a time"),
    ],
)
def test_cases_that_are_none(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()
