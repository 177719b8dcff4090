"""Runs the checks of a case, and turns cases into pytest tests."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from backpack_core.errors import AutodiffFallbackWarning, UsageError, ZeroCurvatureWarning, nearest
from backpack_core.testing.cases import Case, installed
from backpack_core.testing.checks import Check, checks_for
from backpack_core.testing.compare import CheckFailure
from backpack_core.testing.layer_run import traits
from backpack_core.testing.network import install_own_rules

Status = Literal["passed", "failed", "expected failure", "unexpected pass", "not judged"]
Test = Callable[..., Any]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        case: Label of the case.
        check: Name of the check.
        status: The outcome. An expected failure that passes is a failure. A check is not judged if
            one of its prerequisites failed.
        message: What was found, or the reason for an expected failure.
        error: What the check raised.
    """

    case: str
    check: str
    status: Status
    message: str = ""
    error: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the check counts as passed."""
        return self.status in ("passed", "expected failure")


def check_case(case: Case, checks: Iterable[str] | None = None) -> list[CheckResult]:
    """Run every check that applies to a layer rule, a loss rule or an extension.

    Args:
        case: A :class:`RuleCase`, :class:`LossCase` or :class:`ExtensionCase`.
        checks: Names of the checks to run, without their prerequisites; default: all that apply,
            each after its prerequisites.

    Returns:
        One result for each check. A fault in the rule or extension does not raise an error.

    Raises:
        UsageError: It is not a case, it cannot be run, or it lacks one of the named checks.
    """
    _require_case(case)
    by_name = {check.name: check for check in checks_of(case)}
    if checks is None:
        return [_judged(case, check) for check in by_name.values()]
    wanted = list(checks)
    unknown = sorted({*wanted} - {*by_name})
    if unknown:
        raise UsageError(f"{case.label()} has no check {unknown}{nearest(unknown[0], by_name)}")
    return [outcome(case, by_name[name]) for name in wanted]


def checks_of(case: Case) -> list[Check]:
    """The checks that apply to a case, in order.

    Raises:
        UsageError: The case cannot be run, or expects a failure of a check that it does not have.
    """
    try:
        case_traits = traits(case)
    except Exception as error:
        raise UsageError(
            f"{case.label()} cannot be run, so there is nothing to check: "
            f"{type(error).__name__}: {error}"
        ) from error
    applicable = [check for check in checks_for(case.kind) if check.needs <= case_traits]
    names = [check.name for check in applicable]
    unknown = set(case.expected_failures) - set(names)
    if unknown:
        raise UsageError(
            f"{case.label()} expects {sorted(unknown)} to fail, but has no such check. "
            f"It has: {', '.join(names)}."
        )
    return applicable


# The status of the checks of each case that ran; "reported" is a failure that a test has shown.
_ran: WeakKeyDictionary[Case, dict[str, str]] = WeakKeyDictionary()


def outcome(case: Case, check: Check) -> CheckResult:
    """Run one check without its prerequisites."""
    install_own_rules()
    error, reason = None, case.expected_failures.get(check.name)
    with installed(case), warnings.catch_warnings():
        # Results are exact, and the user's own nets give this warning.
        warnings.simplefilter("ignore", AutodiffFallbackWarning)
        warnings.simplefilter("ignore", ZeroCurvatureWarning)  # zero is the expected value
        try:
            check.run(case)
        except Exception as fault:
            error = fault
    status: Status = "failed" if error else "passed"
    message = f"{type(error).__name__}: {error}" if error else ""
    if reason is not None:
        said = f"{check.name!r} passes, but is declared to fail ({reason!r}): remove this."
        status = "expected failure" if error else "unexpected pass"
        message = reason if error else said
    _ran.setdefault(case, {})[check.name] = status
    return CheckResult(case.label(), check.name, status, message, error)


def first_cause(case: Case, check: Check) -> Check | None:
    """The first failed check among all prerequisites of a check; they run if they have not yet."""
    for prerequisite in checks_of(case):
        if check.rests_on(prerequisite):
            cause = first_cause(case, prerequisite)
            if cause is None and prerequisite.name not in _ran.get(case, {}):
                outcome(case, prerequisite)
            if cause is not None or _ran[case][prerequisite.name] in ("failed", "reported"):
                return cause or prerequisite
    return None


def _judged(case: Case, check: Check) -> CheckResult:
    """The outcome of a check, unless one of its prerequisites failed."""
    cause = first_cause(case, check)
    if cause is None:
        return outcome(case, check)
    return CheckResult(case.label(), check.name, "not judged", f"not judged: {cause.name} failed")


@dataclass(eq=False)
class BoundCheck:
    """One check of one case: the argument of a decorated test, which must call it once.

    Attributes:
        case: The case.
        check: The check.
        called: Whether the test called it.
    """

    case: Case
    check: Check
    called: bool = False

    def __call__(self) -> None:
        """Run the check, unless one of its prerequisites failed.

        Raises:
            Exception: The rule or extension raised.
            Failed: The check found a fault; or a prerequisite did, and no test of this process has
                reported it (because it was not selected, or runs in another process).
            Skipped: It is not judged.
            AssertionError: An expected failure passed.
        """
        import pytest

        self.called = True
        __tracebackhide__ = True
        cause = first_cause(self.case, self.check)
        check = cause or self.check
        message = f"not judged: {check.name} failed" if cause else ""
        if cause and _ran[self.case][check.name] == "reported":
            pytest.skip(message)
        result = outcome(self.case, check)
        if result.status == "expected failure":
            pytest.xfail(result.message)
        if result.status == "unexpected pass":
            raise AssertionError(result.message)
        if result.error is not None:
            _ran[self.case][check.name] = "reported"
            if not isinstance(result.error, CheckFailure):
                raise result.error
            lines = message, f"{check.name} of {result.case}", str(result.error)
            said = "\n".join(filter(None, [*lines, self._resting(check)]))
            pytest.fail(said, pytrace=False)

    def _resting(self, check: Check) -> str:
        """The end of the message: how many checks build on a failed one."""
        failed = [check]
        for other in checks_of(self.case):
            failed += [other] if any(map(other.rests_on, failed)) else []
        rest = f"Not judged, since they rest on it: {len(failed) - 1} checks."
        return rest if len(failed) > 1 else ""


def _require_case(case: object) -> None:
    if not isinstance(case, Case):
        raise UsageError(
            f"Checks take a RuleCase, a LossCase or an ExtensionCase. Got {case!r:.80}."
        )


def parametrize_checks(cases: Sequence[Case]) -> Callable[[Test], Test]:
    """Give a test one pytest case for every check of every case.

    The test has an argument ``check``, and fails unless it calls it. A case gets all checks that
    apply to it.

    Args:
        cases: Layers, losses or extensions, each in one configuration.

    Raises:
        UsageError: There are no cases, or the function does not take a check.
    """
    import pytest

    if not cases:
        raise UsageError("No case was given: nothing would be checked.")
    for case in cases:
        _require_case(case)

    def decorate(test: Test) -> Test:
        if "check" not in inspect.signature(test).parameters:
            raise UsageError(f"{test.__qualname__} needs an argument named 'check', to call it.")
        labels = [case.label() for case in cases]
        parameters = []
        for at, (case, label) in enumerate(zip(cases, labels, strict=True)):
            number = f" #{labels[: at + 1].count(label)}" if labels.count(label) > 1 else ""
            parameters += [
                pytest.param(BoundCheck(case, check), id=f"{label}{number}-{check.name}")
                for check in checks_of(case)
            ]

        @functools.wraps(test)
        def called(*args: Any, check: BoundCheck, **kwargs: Any) -> None:
            test(*args, check=check, **kwargs)
            if not check.called:
                raise AssertionError(f"{test.__qualname__} never called its check: write check().")

        decorated: Test = pytest.mark.parametrize("check", parameters)(called)
        return decorated

    return decorate
