"""Runs the checks of a case, and turns cases into pytest tests. Imports all checks."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from backpack_core.errors import AutodiffFallbackWarning, UsageError, ZeroCurvatureWarning
from backpack_core.testing.cases import Case, ExtensionCase, LossCase, RuleCase, installed
from backpack_core.testing.checks import CHECKS, Check
from backpack_core.testing.compare import CheckFailure
from backpack_core.testing.network import install_own_rules
from backpack_core.testing.traits import traits

Status = Literal["passed", "failed", "expected failure", "unexpected pass", "not judged"]
Test = Callable[..., Any]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        case: Label of the case.
        check: Name of the check.
        status: What happened. An expected failure that passes is a failure. A check is not judged
            if one failed that it rests on.
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
        checks: Names of the checks to run, whatever became of others; default: all that mean
            something for it, each after those it rests on.

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
    return [_result(case, own[name], names is None) for name in wanted]


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


# For each case, the checks that ran, and which of them failed though that was not declared.
_failed: WeakKeyDictionary[Case, dict[str, bool]] = WeakKeyDictionary()


def outcome(case: Case, check: Check) -> Exception | None:
    """Run one check, and return the fault that it found."""
    install_own_rules()
    error = None
    with installed(getattr(case, "rule", None)), warnings.catch_warnings():
        # Results are exact, and the user's own nets give this warning.
        warnings.simplefilter("ignore", AutodiffFallbackWarning)
        warnings.simplefilter("ignore", ZeroCurvatureWarning)  # zero is the expected value
        try:
            check.run(case)
        except Exception as fault:
            error = fault
    surprising = error is not None and check.name not in case.expected_failures
    _failed.setdefault(case, {})[check.name] = surprising
    return error


def first_cause(case: Case, check: Check) -> Check | None:
    """The check at the bottom that failed, of those that a check rests on; they run if need be."""
    own = {other.name: other for other in checks_of(case)}
    for ground in (own[name] for name in check.grounds if name in own):
        deeper = first_cause(case, ground)
        if deeper is not None:
            return deeper
        if ground.name not in _failed.get(case, {}):
            outcome(case, ground)
        if _failed[case][ground.name]:
            return ground
    return None


def _result(case: Case, check: Check, in_order: bool) -> CheckResult:
    made = functools.partial(CheckResult, case.label(), check.name)
    cause = first_cause(case, check) if in_order else None
    if cause is not None:
        return made("not judged", f"not judged: {cause.name} failed")
    error = outcome(case, check)
    reason = case.expected_failures.get(check.name)
    if reason is None:
        message = "" if error is None else f"{type(error).__name__}: {error}"
        return made("failed" if error else "passed", message)
    if error:
        return made("expected failure", reason)
    return made("unexpected pass", _unexpected_pass(check.name, reason))


def _unexpected_pass(name: str, reason: str) -> str:
    return f"{name!r} passes, but is declared to fail ({reason!r}): remove the declaration."


def _resting(case: Case, check: Check) -> int:
    """How many checks of a case rest on one."""
    found = {check.name}
    for other in checks_of(case):
        found |= {other.name} if found & set(other.grounds) else set()
    return len(found) - 1


_reported: WeakKeyDictionary[Case, set[str]] = WeakKeyDictionary()


@dataclass(eq=False)
class BoundCheck:
    """One check of one case, the argument of a decorated test, which has to call it once.

    Attributes:
        case: The case.
        check: The check.
        called: Whether the test called it.
    """

    case: Case
    check: Check
    called: bool = False

    def __call__(self) -> None:
        """Run the check, unless one failed that it rests on.

        Raises:
            Exception: The rule or extension raised.
            Failed: The check found a fault. Where no test of this process has said yet that the
                cause failed (it was not selected, or runs elsewhere), this one does.
            Skipped: It is not judged.
            AssertionError: A declared failure passed.
        """
        import pytest

        self.called = True
        __tracebackhide__ = True
        check = first_cause(self.case, self.check) or self.check
        reported = _reported.setdefault(self.case, set())
        if check is not self.check and check.name in reported:
            pytest.skip(f"not judged: {check.name} failed")
        error = outcome(self.case, check)
        reason = self.case.expected_failures.get(check.name)
        if reason is not None and error is None:
            raise AssertionError(_unexpected_pass(check.name, reason))
        if reason is not None:
            pytest.xfail(reason)
        if error is not None:
            reported.add(check.name)
            said = "" if check is self.check else f"not judged: {check.name} failed\n"
            if not isinstance(error, CheckFailure):
                raise error
            resting = _resting(self.case, check)
            said += f"{check.name} of {self.case.label()}\n{error}"
            if resting:
                said += f"\nNot judged, since they rest on it: {resting} checks."
            pytest.fail(said, pytrace=False)


def parametrize_rule_checks(cases: Sequence[RuleCase]) -> Callable[[Test], Test]:
    """Give a test one pytest case for every check of every layer.

    The test has one argument, ``check``, and fails unless it calls that. A case gets all checks
    that apply to its kind of rule.

    Args:
        cases: The layers, each in one configuration.

    Raises:
        UsageError: There are no cases, or the function does not take a check.
    """
    return _parametrize(cases, RuleCase)


def parametrize_loss_checks(cases: Sequence[LossCase]) -> Callable[[Test], Test]:
    """The same for losses; see :func:`parametrize_rule_checks`."""
    return _parametrize(cases, LossCase)


def parametrize_extension_checks(cases: Sequence[ExtensionCase]) -> Callable[[Test], Test]:
    """The same for extensions; see :func:`parametrize_rule_checks`."""
    return _parametrize(cases, ExtensionCase)


def _parametrize(cases: Sequence[Case], kind: type[Case]) -> Callable[[Test], Test]:
    import pytest

    if not cases:
        raise UsageError(f"No {kind.__name__} was given: nothing would be checked.")
    wrong = [case for case in cases if not isinstance(case, kind)]
    if wrong:
        raise UsageError(f"Expected instances of {kind.__name__}. Got {wrong[0]!r}.")

    def decorate(test: Test) -> Test:
        if "check" not in inspect.signature(test).parameters:
            raise UsageError(f"{test.__qualname__} needs an argument named 'check', to call it.")
        parameters = [
            pytest.param(BoundCheck(case, check), id=f"{label}-{check.name}")
            for case, label in zip(cases, _labels(cases), strict=True)
            for check in checks_of(case)
        ]
        decorated: Test = pytest.mark.parametrize("check", parameters)(_that_calls(test))
        return decorated

    return decorate


def _that_calls(test: Test) -> Test:
    """Make a test fail if it passes without calling its check."""

    @functools.wraps(test)
    def called(*args: Any, check: BoundCheck, **kwargs: Any) -> None:
        test(*args, check=check, **kwargs)
        if not check.called:
            raise AssertionError(f"{test.__qualname__} never called its check: write check().")

    return called


def _labels(cases: Sequence[Case]) -> list[str]:
    """A name for each case; equal ones are numbered."""
    found = [case.label() for case in cases]
    return [
        name if found.count(name) == 1 else f"{name} #{found[: position + 1].count(name)}"
        for position, name in enumerate(found)
    ]
