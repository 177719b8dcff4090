"""The list of checks. A decorator registers each, with the traits that a case must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Run = TypeVar("Run", bound=Callable[..., None])


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Name of the check.
        run: Takes a case, and raises if it finds a fault.
        needs: Traits a case must have for the check to mean anything; see ``traits``.
    """

    name: str
    run: Callable[[Any], None]
    needs: frozenset[str]


# By kind of case. A test pins each list: a check that is removed is removed for all authors.
CHECKS: dict[str, list[Check]] = {"rule": [], "loss": [], "extension": []}


def of_rule(*needs: str, name: str = "") -> Callable[[Run], Run]:
    """Register a function as a check of layer rules.

    Args:
        needs: Traits a case must have.
        name: The check's name, where it is not the function's.
    """
    return _entered("rule", needs, name)


def of_loss(*needs: str, name: str = "") -> Callable[[Run], Run]:
    """Register a function as a check of loss rules; see :func:`of_rule`."""
    return _entered("loss", needs, name)


def of_extension(*needs: str, name: str = "") -> Callable[[Run], Run]:
    """Register a function as a check of extensions; see :func:`of_rule`."""
    return _entered("extension", needs, name)


def _entered(kind: str, needs: tuple[str, ...], name: str) -> Callable[[Run], Run]:
    def enter(run: Run) -> Run:
        CHECKS[kind].append(Check(name or run.__name__, run, frozenset(needs)))
        return run

    return enter
