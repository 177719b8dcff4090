"""Decorators that turn cases into pytest tests, one for each check. Imports pytest on use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backpack_core.errors import UsageError
from backpack_core.testing.cases import Case, ExtensionCase, LossCase, RuleCase
from backpack_core.testing.checks import Check
from backpack_core.testing.runner import checks_of, outcome, unexpected_pass

Test = Callable[..., Any]


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
        """Run the check.

        Raises:
            Exception: The fault of the rule or extension.
            AssertionError: A declared failure passed.
        """
        import pytest

        self.called = True
        error = outcome(self.case, self.check)
        reason = self.case.expected_failures.get(self.check.name)
        if reason is None:
            if error is not None:
                raise error
        elif error is None:
            raise AssertionError(unexpected_pass(self.check.name, reason))
        else:
            pytest.xfail(reason)


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

    _check_cases(cases, kind)

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


def _check_cases(cases: Sequence[Case], kind: type[Case]) -> None:
    if not cases:
        raise UsageError(f"No {kind.__name__} was given: nothing would be checked.")
    wrong = [case for case in cases if not isinstance(case, kind)]
    if wrong:
        raise UsageError(f"Expected instances of {kind.__name__}. Got {wrong[0]!r}.")


def _labels(cases: Sequence[Case]) -> list[str]:
    """A name for each case; equal ones are numbered."""
    found = [case.label() for case in cases]
    return [
        name if found.count(name) == 1 else f"{name} #{found[: position + 1].count(name)}"
        for position, name in enumerate(found)
    ]
