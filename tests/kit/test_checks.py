"""The list of checks and their results: names, strictness, and that nothing vanishes."""

from __future__ import annotations

import subprocess
import sys
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
    check_case,
    checks,
    layer_run,
    parametrize_checks,
)
from backpack_core.testing.checks import checks_for, register_checks
from tests.kit.layers import Gain, GainRule, Temperature, TemperatureRule, case_of
from tests.kit.test_faults import WrongSign

NAMES = {
    "rule": """
        mixes_samples not_twice_differentiable overwritten_input accepts hessian_is_zero
        hessian_is_diagonal linear_in_params derivative jac_t_mat_prod affine_weight affine_form
        param_jac_t_mat_prod jacobian_is_constant called_again jac_mat_prod param_jac_mat_prod
        operations second_derivative second_derivative_mat_prod subsampled_call
        non_contiguous_columns non_contiguous_input changed_since
        other_inputs one_sample empty_batch large_inputs other_mode
        mean sum batch_of_one frozen_layer frozen_surroundings retain_graph called_twice
        deepcopy pickle no_live_calls partly_frozen differentiable subsampling keeps_dtype
        float32 autocast bfloat16 mixing_is_refused
    """,
    "loss": """
        samples_are_separate hessian_is_psd normalisation
        hessian_mat_prod_sum sqrt_hessian_sum gradient_sum sum_hessian_sum
        sqrt_hessian_sampled_sum arriving_gradient_sum started_extensions_sum
        hessian_mat_prod_mean sqrt_hessian_mean gradient_mean sum_hessian_mean
        sqrt_hessian_sampled_mean arriving_gradient_mean started_extensions_mean
        other_inputs subsampled_call non_contiguous_input float32
        leaves_arguments_alone unreduced
    """,
    "extension": """
        declarations mean sum batch_of_one shared_positions single_number residual called_twice
        no_samples quantity frozen_surroundings partly_frozen loss_scaled in_chunks float32
        bfloat16 retain_graph beside_others leaves_gradient_alone pickle_extension no_live_calls
        differentiable subsampling savefield degree samples_add two_halves_mean two_halves_sum
    """,
}


def test_no_check_vanishes() -> None:
    found = {kind: [check.name for check in checks_for(kind)] for kind in NAMES}
    assert found == {kind: names.split() for kind, names in NAMES.items()}
    assert all(len(set(names)) == len(names) for names in found.values())


def test_prerequisites_are_checks_that_come_before() -> None:
    for kind in NAMES:
        before: set[str] = set()
        for check in checks_for(kind):
            assert check.prerequisites <= before, check.name
            before |= {check.name, check.kind}


def test_what_rests_on_a_failure_is_not_judged() -> None:
    results = {r.check: r for r in check_case(case_of(Gain, WrongSign))}
    assert [name for name, r in results.items() if r.status == "failed"] == ["jac_t_mat_prod"]
    assert results["param_jac_t_mat_prod"].status == "passed"
    assert results["mean"].status == "not judged"
    assert results["batch_of_one"].message == "not judged: jac_t_mat_prod failed"
    assert not results["mean"].ok


def test_a_failure_that_is_declared_hides_nothing() -> None:
    case = case_of(Gain, WrongSign, expected_failures={"jac_t_mat_prod": "known"})
    results = {r.check: r.status for r in check_case(case)}
    assert results["jac_t_mat_prod"] == "expected failure"
    assert results["called_again"] == "failed"


def test_checks_of_libraries_come_after_those_that_they_rest_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In any order of registration; libraries also bring the traits that their checks need."""
    seen: list[str] = []
    monkeypatch.setattr(checks, "_checks", [*checks._checks])
    monkeypatch.setattr(layer_run, "more_traits", [*layer_run.more_traits, lambda run: {"odd": 1}])
    functions = {name: lambda run, name=name: seen.append(name) for name in ("later", "first")}
    try:
        register_checks("rule", "later | odd | first keeps_dtype", functions, layer_run.traits)
        register_checks("rule", "never | not odd |", {"never": print}, layer_run.traits)
        register_checks("method", "first | odd |", functions, layer_run.traits)
        results = {r.check: r for r in check_case(case_of(Gain, WrongSign))}
        names = [*results]
    finally:
        checks_for.cache_clear()
    assert names.index("first") < names.index("keeps_dtype") < names.index("later")
    assert seen == ["first"]
    assert results["later"].message == "not judged: jac_t_mat_prod failed"
    assert results["mean"].status == "not judged"
    assert "never" not in names


@pytest.mark.parametrize(
    "first", ["backpack_core.testing", "backpack_products.conformance.loss_checks"]
)
def test_the_kit_has_all_checks_whatever_is_imported_first(first: str) -> None:
    """Authors import the kit alone; it imports the checks of products, which import the kit."""
    code = (
        f"import {first}\n"
        "from backpack_core.testing.checks import checks_for\n"
        f"print(*(len(checks_for(kind)) for kind in {[*NAMES]}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(len(names.split())) for names in NAMES.values()]


def test_needs_are_traits() -> None:
    """A trait that no case can have would switch a check off."""
    known = {trait.removeprefix("not ") for trait in layer_run.traits(case_of(Gain, GainRule))}
    known |= {"subsampling", "savefield"}
    needed = {need for kind in NAMES for check in checks_for(kind) for need in check.needs}
    assert {need.removeprefix("not ") for need in needed} <= known


def test_results_are_structured() -> None:
    results = check_case(case_of(Gain, WrongSign, name="gain"), ["jac_t_mat_prod", "accepts"])
    assert [(r.case, r.check, r.status, r.ok) for r in results] == [
        ("gain", "jac_t_mat_prod", "failed", False),
        ("gain", "accepts", "passed", True),
    ]


def test_expected_failures_are_strict() -> None:
    declared = {"jac_t_mat_prod": "known", "accepts": "not true"}
    case = case_of(Gain, WrongSign, expected_failures=declared)
    found = {r.check: r for r in check_case(case, declared)}
    assert found["jac_t_mat_prod"].status == "expected failure"
    assert found["jac_t_mat_prod"].message == "known"
    assert found["accepts"].status == "unexpected pass"
    assert not found["accepts"].ok


def test_expected_failures_must_name_a_check_of_the_case() -> None:
    with pytest.raises(UsageError, match="affine_form"):
        check_case(case_of(Gain, GainRule, expected_failures={"affine_form": "no"}))


def test_a_check_that_is_asked_for_must_exist() -> None:
    with pytest.raises(
        UsageError, match=r"has no check \['one_sampel'\]: did you mean 'one_sample'"
    ):
        check_case(case_of(Gain, GainRule), ["one_sampel"])


def test_no_cases_and_wrong_cases_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing would be checked"):
        parametrize_checks([])
    with pytest.raises(UsageError, match=r"RuleCase.*Got MSELoss"):
        parametrize_checks([nn.MSELoss()])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="'check'"):
        parametrize_checks([case_of(Gain, GainRule)])(lambda: None)


def test_a_layer_without_a_rule_cannot_be_checked() -> None:
    with pytest.raises(UsageError, match=r"No rule speaks for Gain: .*\[project.entry-"):
        check_case(RuleCase(Gain, lambda n: torch.randn(n, 4)))


def test_parameters_may_be_single_numbers() -> None:
    assert not [r for r in check_case(case_of(Temperature, TemperatureRule)) if not r.ok]


def test_losses_and_extensions_have_results_too() -> None:
    loss = LossCase(nn.MSELoss, lambda n: (torch.randn(n, 2), torch.randn(n, 2)))
    assert all(result.ok for result in check_case(loss))
    from backpack_core.extensions import BatchGrad

    results = check_case(ExtensionCase(BatchGrad))
    assert len(results) == len(checks_for("extension"))
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
        (lambda: check_case(GainRule), "Checks take a RuleCase"),
        (lambda: check_case([case_of(Gain, GainRule)]), "Checks take a RuleCase"),
    ],
)
def test_cases_that_are_none(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()
