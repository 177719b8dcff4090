"""The kit's promise: names, strictness, and that nothing vanishes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.errors import UsageError
from backpack_core.testing import (
    ExtensionCase,
    LossCase,
    RuleCase,
    check_extension,
    check_loss,
    check_rule,
    parametrize_rule_checks,
)
from backpack_core.testing.implementations import IMPLEMENTED
from backpack_core.testing.promise import KIT_VERSION, PROMISED
from backpack_core.testing.runner import VanishedCheckError
from tests.kit.layers import Gain, GainRule, case_of
from tests.kit.test_faults import WrongSign

COUNTS = {1: {"rule": 40, "loss": 19, "extension": 16}}


def test_the_lists_of_checks_belong_to_the_version() -> None:
    counts = {kind: len(rows) for kind, rows in PROMISED.items()}
    assert counts == COUNTS[KIT_VERSION]
    names = [row.name for rows in PROMISED.values() for row in rows]
    assert len(set(names)) == len(names)
    assert all(row.states for rows in PROMISED.values() for row in rows)


def test_every_promised_check_is_implemented() -> None:
    assert set(IMPLEMENTED) == {row.name for rows in PROMISED.values() for row in rows}


def test_a_vanished_implementation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(IMPLEMENTED, "jac_t_mat_prod")
    with pytest.raises(VanishedCheckError, match="jac_t_mat_prod"):
        check_rule(case_of(Gain, GainRule))


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
    assert len(results) == COUNTS[KIT_VERSION]["extension"]
    assert all(result.ok for result in results)
