"""Runs the checks of a case, and compares outcomes with expected failures. Imports all checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from backpack_core.errors import AutodiffFallbackWarning, UsageError, ZeroCurvatureWarning
from backpack_core.testing import (
    extension_checks,  # noqa: F401 - these enter the checks
    loss_checks,  # noqa: F401
    merging_checks,  # noqa: F401
    network_checks,  # noqa: F401
    property_checks,  # noqa: F401
    rule_checks,  # noqa: F401
    situation_checks,  # noqa: F401
)
from backpack_core.testing.cases import Case, ExtensionCase, LossCase, RuleCase, installed
from backpack_core.testing.checks import CHECKS, Check
from backpack_core.testing.network import install_own_rules
from backpack_core.testing.traits import traits

Status = Literal["passed", "failed", "expected failure", "unexpected pass"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        case: Label of the case.
        check: Name of the check.
        status: What happened. An expected failure that passes is a failure.
        message: What was found, or the reason for an expected failure.
    """

    case: str
    check: str
    status: Status
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether the check counts as passed."""
        return self.status in ("passed", "expected failure")


def check_rule(case: RuleCase, checks: Iterable[str] | None = None) -> list[CheckResult]:
    """Run every check of a layer rule.

    Args:
        case: The layer.
        checks: Names of the checks to run; default: all that mean something for it.

    Returns:
        One result for each check. Nothing is raised for a fault in the rule.
    """
    return _check(case, checks)


def check_loss(case: LossCase, checks: Iterable[str] | None = None) -> list[CheckResult]:
    """Run every check of a loss rule; see :func:`check_rule`."""
    return _check(case, checks)


def check_extension(case: ExtensionCase, checks: Iterable[str] | None = None) -> list[CheckResult]:
    """Run every check of an extension; see :func:`check_rule`."""
    return _check(case, checks)


def _check(case: Case, names: Iterable[str] | None) -> list[CheckResult]:
    given: object = case
    if not isinstance(given, Case):
        raise UsageError(
            "One case is checked at a time: a RuleCase(...), a LossCase(...) or an "
            f"ExtensionCase(...). Got {given!r:.80}."
        )
    own = {check.name: check for check in checks_of(case)}
    wanted = list(own) if names is None else list(names)
    unknown = set(wanted) - set(own)
    if unknown:
        raise UsageError(f"No such checks for {case.label()}: {sorted(unknown)}.")
    return [_result(case, own[name]) for name in wanted]


def checks_of(case: Case) -> list[Check]:
    """The checks that mean something for a case, in order.

    Raises:
        UsageError: The case cannot be run, or expects a failure of a check that it does not have.
    """
    try:
        found = traits(case)
    except Exception as error:
        raise UsageError(
            f"{case.label()} cannot be run, so there is nothing to check: "
            f"{type(error).__name__}: {error}"
        ) from error
    own = [check for check in CHECKS[case.kind] if check.needs <= found]
    names = [check.name for check in own]
    unknown = set(case.expected_failures) - set(names)
    if unknown:
        raise UsageError(
            f"{case.label()} expects {sorted(unknown)} to fail, but has no such check. "
            f"It has: {', '.join(names)}."
        )
    return own


def _result(case: Case, check: Check) -> CheckResult:
    error = outcome(case, check)
    message = "" if error is None else f"{type(error).__name__}: {error}"
    reason = case.expected_failures.get(check.name)
    if reason is None:
        return CheckResult(case.label(), check.name, "failed" if error else "passed", message)
    if error:
        return CheckResult(case.label(), check.name, "expected failure", reason)
    passed = unexpected_pass(check.name, reason)
    return CheckResult(case.label(), check.name, "unexpected pass", passed)


def unexpected_pass(name: str, reason: str) -> str:
    """The message for an expected failure that passes."""
    return f"{name!r} passes, but is declared to fail ({reason!r}): remove the declaration."


def outcome(case: Case, check: Check) -> Exception | None:
    """Run one check, and return the fault that it found."""
    try:
        with _environment(case):
            check.run(case)
    except Exception as error:
        return error
    return None


@contextmanager
def _environment(case: Case) -> Iterator[None]:
    """Installs the rule under test inside the block, and the kit's own rules for good."""
    install_own_rules()
    with installed(getattr(case, "rule", None)), warnings.catch_warnings():
        # Results are exact, and the user's own nets give this warning.
        warnings.simplefilter("ignore", AutodiffFallbackWarning)
        warnings.simplefilter("ignore", ZeroCurvatureWarning)  # zero is the expected value
        yield
