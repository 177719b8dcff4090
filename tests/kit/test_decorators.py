"""Checks as pytest tests, in runs of their own."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = ["pytester"]

CASES = """
import torch
from torch import nn
from backpack_core.testing import RuleCase, parametrize_checks

GOOD = RuleCase(lambda: nn.Linear(2, 1), lambda n: torch.randn(n, 2), name="linear")
"""
GOOD = """
@parametrize_checks([GOOD])
def test_linear(check):
    check()
"""
RUN = ("-p", "no:cacheprovider", "-p", "no:randomly", "-q")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Tests that fail inside keep what they had, for whoever looks at their tracebacks."""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    torch.set_default_dtype(torch.float32)  # as in a process of its own
    return pytester.runpytest_inprocess(*RUN, *arguments)


def test_each_check_is_a_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES + GOOD)
    result = run(pytester, "--collect-only")
    assert result.ret == 0
    names = [line.partition("::")[2] for line in result.outlines if "::" in line]
    assert len(names) > 25
    assert "test_linear[linear-jac_t_mat_prod]" in names


def test_a_test_that_does_not_call_its_check_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        CASES
        + """
@parametrize_checks([GOOD])
def test_forgets_to_call(check):
    pass

class TestOfAClass:
    @parametrize_checks([GOOD])
    def test_calls(self, check, tmp_path):
        check()
"""
    )
    result = run(pytester, "-k", "accepts")
    result.assert_outcomes(failed=1, passed=1, deselected=result.parseoutcomes()["deselected"])
    assert "test_forgets_to_call never called its check" in result.stdout.str()


def test_expected_failures_are_reported_and_strict(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        CASES
        + """
from backpack_products import AffineRule
from backpack_layers.linear import LinearRule

class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

class OtherRule(LinearRule):
    module_types = (Other,)

@parametrize_checks([RuleCase(
    lambda: Other(2, 1), lambda n: torch.randn(n, 2), rule=OtherRule, name="other",
    expected_failures={"jac_t_mat_prod": "a factor of two", "accepts": "never"},
)])
def test_other(check):
    check()
"""
    )
    result = run(pytester, "-rx", "-k", "other-jac_t_mat_prod or other-accepts")
    result.assert_outcomes(xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*a factor of two*"])
    result.stdout.fnmatch_lines(["*declared to fail*"])


BROKEN = """
from backpack_layers.linear import LinearRule

class Other(nn.Linear):
    pass

class OtherRule(LinearRule):
    module_types = (Other,)

    def _jac_t_mat_prod(self, view, mat):
        return super()._jac_t_mat_prod(view, mat) / 2

@parametrize_checks([RuleCase(
    lambda: Other(2, 1), lambda n: torch.randn(n, 2), rule=OtherRule, name="other",
)])
def test_other(check):
    check()
"""


def test_the_first_cause_is_shown_first_and_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES + BROKEN)
    result = run(pytester, "-rs")
    counts = result.parseoutcomes()
    assert counts["failed"] == 1
    assert counts["skipped"] > 15
    lines = result.outlines
    first = next(number for number, line in enumerate(lines) if "FAILURES" in line)
    assert "test_other[other-jac_t_mat_prod]" in lines[first + 1]
    assert lines[first + 2].startswith("jac_t_mat_prod of other")
    assert "expected" in lines[first + 3]
    assert "0.5 times the right value: a wrong factor" in lines[first + 3]
    assert lines[first + 4] == f"Not judged, since they rest on it: {counts['skipped']} checks."
    result.stdout.fnmatch_lines(["SKIPPED [[]*not judged: jac_t_mat_prod failed"])
    assert len(lines) <= 20


def test_what_was_not_selected_is_still_seen(pytester: pytest.Pytester) -> None:
    """A check whose cause is in no other test of the run fails, and shows the cause."""
    pytester.makepyfile(CASES + BROKEN)
    result = run(pytester, "-k", "batch_of_one or autocast")
    result.assert_outcomes(failed=1, skipped=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(
        ["not judged: jac_t_mat_prod failed", "jac_t_mat_prod of other", "*expected*found*"]
    )
