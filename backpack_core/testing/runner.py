"""Runs the checks of a case, and makes sure that none is missing. Imports the implementations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from backpack_core.errors import AutodiffFallbackWarning, UsageError, ZeroCurvatureWarning
from backpack_core.testing import (
    extension_checks,  # noqa: F401 - these enter the implementations
    loss_checks,  # noqa: F401
    network_checks,  # noqa: F401
    property_checks,  # noqa: F401
    rule_checks,  # noqa: F401
)
from backpack_core.testing.cases import Case, ExtensionCase, LossCase, RuleCase, installed
from backpack_core.testing.implementations import IMPLEMENTED
from backpack_core.testing.network import install_own_rules
from backpack_core.testing.promise import PROMISED
from backpack_core.testing.traits import promised

Status = Literal["passed", "failed", "expected failure", "unexpected pass"]


class VanishedCheckError(AssertionError):
    """Fewer checks ran than the kit promises."""


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
        checks: Names of the checks to run; default: all that are promised for it.

    Returns:
        One result for each check. Nothing is raised for a fault in the rule.

    Raises:
        VanishedCheckError: A promised check did not run.
    """
    return _check(case, checks)


def check_loss(case: LossCase, checks: Iterable[str] | None = None) -> list[CheckResult]:
    """Run every check of a loss rule; see :func:`check_rule`."""
    return _check(case, checks)


def check_extension(case: ExtensionCase, checks: Iterable[str] | None = None) -> list[CheckResult]:
    """Run every check of an extension; see :func:`check_rule`."""
    return _check(case, checks)


def _check(case: Case, checks: Iterable[str] | None) -> list[CheckResult]:
    names = promised_names(case)
    wanted = names if checks is None else list(checks)
    unknown = set(wanted) - set(names)
    if unknown:
        raise UsageError(f"No such checks for {case.label()}: {sorted(unknown)}.")
    results = [run_check(case, name) for name in wanted]
    require_complete(case.label(), (result.check for result in results), wanted)
    return results


def promised_names(case: Case) -> list[str]:
    """Names of the checks that must run for a case, in order.

    Raises:
        UsageError: The case cannot be run, or expects a failure of a check that it does not have.
        VanishedCheckError: A promised check has no implementation.
    """
    try:
        names = [row.name for row in promised(case)]
    except Exception as error:
        raise UsageError(
            f"{case.label()} cannot be run, so there is nothing to check: "
            f"{type(error).__name__}: {error}"
        ) from error
    unknown = set(case.expected_failures) - set(names)
    if unknown:
        raise UsageError(
            f"{case.label()} expects {sorted(unknown)} to fail, but has no such check. "
            f"It has: {', '.join(names)}."
        )
    require_complete(
        "the kit",
        IMPLEMENTED,
        [row.name for row in PROMISED[case.kind]],
    )
    return names


def require_complete(what: str, ran: Iterable[str], promised_: Iterable[str]) -> None:
    """Raise unless every promised check is among those that ran.

    Raises:
        VanishedCheckError: With the names of the missing ones.
    """
    missing = sorted(set(promised_) - set(ran))
    if missing:
        raise VanishedCheckError(
            f"{what}: {len(missing)} promised checks did not run: {', '.join(missing)}."
        )


def run_check(case: Case, name: str) -> CheckResult:
    """Run one check, and put its outcome against what the case expects."""
    message = ""
    try:
        perform(case, name)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    reason = case.expected_failures.get(name)
    label = case.label()
    if reason is None:
        return CheckResult(label, name, "failed" if message else "passed", message)
    if message:
        return CheckResult(label, name, "expected failure", reason)
    return CheckResult(label, name, "unexpected pass", unexpected_pass(name, reason))


def unexpected_pass(name: str, reason: str) -> str:
    """What to say of a declared failure that is none."""
    return f"{name!r} passes, but is declared to fail ({reason!r}): remove the declaration."


def perform(case: Case, name: str) -> None:
    """Run one check; it raises where it finds a fault."""
    with environment(case):
        IMPLEMENTED[name](case)


@contextmanager
def environment(case: Case) -> Iterator[None]:
    """The rule under test is installed within the block; the kit's own rules are from now on."""
    install_own_rules()
    with installed(getattr(case, "rule", None)), warnings.catch_warnings():
        # Exact, and said already where the user's own nets run.
        warnings.simplefilter("ignore", AutodiffFallbackWarning)
        warnings.simplefilter("ignore", ZeroCurvatureWarning)  # zero is what is compared
        yield
