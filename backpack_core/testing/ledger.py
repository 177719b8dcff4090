"""What a run of the kit has promised, and what has happened of it. Imports nothing of core.

Checks that silently do not run are the worst failure of a conformance kit. So every decorated test
enters its promise here when it is defined, every check that ran is crossed off, and the run fails
if something is left over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Group = tuple[str, str]  # a decorated test, and a case


@dataclass
class Ledger:
    """Promises and performances, by group.

    Attributes:
        promised: Names of the checks that must run.
        performed: Names of those that ran, or were reported by another process.
    """

    promised: dict[Group, frozenset[str]] = field(default_factory=dict)
    performed: dict[Group, set[str]] = field(default_factory=dict)

    def promise(self, test: str, case: str, checks: Iterable[str]) -> Group:
        """Enter the checks of one case of a decorated test."""
        group = (test, case)
        self.promised[group] = frozenset(checks)
        return group

    def perform(self, group: Group, check: str) -> None:
        """Cross off a check."""
        self.performed.setdefault(group, set()).add(check)

    def missing(self) -> dict[Group, list[str]]:
        """Promised checks that did not run."""
        left = {g: sorted(c - self.performed.get(g, set())) for g, c in self.promised.items()}
        return {group: checks for group, checks in left.items() if checks}

    def counts(self) -> tuple[int, int]:
        """Number of cases and of checks that ran."""
        return len(self.performed), sum(map(len, self.performed.values()))

    def dump(self) -> list[tuple[str, str, list[str]]]:
        """The promises in a form that travels between processes."""
        return [(test, case, sorted(checks)) for (test, case), checks in self.promised.items()]

    def load(self, dumped: Iterable[tuple[str, str, list[str]]]) -> None:
        """Enter the promises of another process."""
        for test, case, checks in dumped:
            self.promise(test, case, checks)


LEDGER = Ledger()
