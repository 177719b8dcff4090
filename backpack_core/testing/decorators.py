"""Decorators that turn cases into pytest tests, one for each check. Imports pytest on use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backpack_core.errors import UsageError
from backpack_core.testing.cases import Case, ExtensionCase, LossCase, RuleCase
from backpack_core.testing.ledger import LEDGER, Group
from backpack_core.testing.runner import perform, promised_names, unexpected_pass

Test = Callable[..., Any]


@dataclass(eq=False)
class BoundCheck:
    """One check of one case: what a decorated test is given, to be called once.

    Attributes:
        case: The case.
        name: The check.
        group: The decorated test and the case, as the ledger of the run knows them.
        called: Whether the test called it.
    """

    case: Case
    name: str
    group: Group
    called: bool = field(default=False, init=False)

    def __call__(self) -> None:
        """Run the check.

        Raises:
            AssertionError: The rule or extension is at fault, or a declared failure passed.
        """
        import pytest

        self.called = True
        reason = self.case.expected_failures.get(self.name)
        if reason is None:
            perform(self.case, self.name)
            return
        try:
            perform(self.case, self.name)
        except Exception:
            pytest.xfail(reason)
        raise AssertionError(unexpected_pass(self.name, reason))


def parametrize_rule_checks(cases: Sequence[RuleCase]) -> Callable[[Test], Test]:
    """Give a test one pytest case for every check of every layer.

    The test has the one argument ``check`` and calls it. The checks of a case are those that this
    version of the kit promises for its kind of rule; a run in which one of them does not happen
    fails.

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
        name = f"{test.__module__}::{test.__qualname__}"
        if "check" not in inspect.signature(test).parameters:
            raise UsageError(f"{name} needs an argument named 'check', and has to call it.")
        parameters = []
        for case, label in zip(cases, _labels(cases), strict=True):
            names = promised_names(case)
            group = LEDGER.promise(name, label, names)
            parameters += [
                pytest.param(BoundCheck(case, check, group), id=f"{label}-{check}")
                for check in names
            ]
        decorated: Test = pytest.mark.parametrize("check", parameters)(test)
        return decorated

    return decorate


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
