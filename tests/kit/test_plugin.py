"""The pytest plugin, in runs of its own: installed, not configured."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

CASES = """
import torch
from torch import nn
from backpack_core.testing import RuleCase, parametrize_rule_checks

GOOD = RuleCase(lambda: nn.Linear(2, 1), lambda n: torch.randn(n, 2), name="linear")
"""
GOOD = """
@parametrize_rule_checks([GOOD])
def test_linear(check):
    check()
"""
RUN = ("-p", "no:cacheprovider", "-p", "no:randomly", "-q")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*RUN, *arguments, timeout=300)


def test_plain_run_counts_its_checks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES + GOOD)
    result = run(pytester)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*conformance kit: * checks of 1 cases*"])
    assert "did not run" not in result.stdout.str()


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_checks_that_vanish_fail_the_run(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(CASES + GOOD)
    pytester.makeconftest(
        "def pytest_collection_modifyitems(items):\n"
        "    items[:] = [item for item in items if 'adjoint' not in item.name]\n"
    )
    result = run(pytester, *workers)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*promised checks that did not run*", "*linear*jac_adjoint*"])


def test_each_way_to_lose_a_check_is_seen(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        CASES
        + """
import pytest

@parametrize_rule_checks([GOOD])
def test_forgets_to_call(check):
    pass

@parametrize_rule_checks([GOOD])
def test_skips(check):
    pytest.skip("no time")

@parametrize_rule_checks([GOOD])
def test_is_shadowed(check):
    check()

def test_is_shadowed():
    pass
"""
    )
    result = run(pytester)
    assert result.ret == 1
    output = result.stdout.str()
    assert "never called its check" in output
    assert "::test_skips [linear]" in output
    assert "::test_is_shadowed [linear]" in output


def test_expected_failures_are_reported_and_strict(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        CASES
        + """
from backpack_core import AffineRule
from backpack_layers.linear import LinearRule

class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

class OtherRule(LinearRule):
    module_types = (Other,)

@parametrize_rule_checks([RuleCase(
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
    result.stdout.fnmatch_lines(["*promised checks were not selected*"])  # which may be


def test_importing_the_plugin_does_not_import_torch() -> None:
    program = (
        "import sys; import backpack_core.testing.pytest_plugin; "
        "sys.exit(sorted({'torch', 'pluggy.x', 'numpy'} & set(sys.modules)) != [])"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
