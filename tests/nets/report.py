"""Counts of verdicts, and the text about faults."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests/conftest.py only adds up numbers
    from tests.nets.verdict import Prepared, Verdict

# Faults of one kind that are shrunk in a block; of the others the seed is told.
SHRUNK = 2
SLOWEST = 5


@dataclass
class Tally:
    """What became of some recipes.

    Attributes:
        outcomes: Number of recipes by outcome.
        causes: Number of recipes by outcome and cause, without the exact ones.
        slowest: Seconds and seeds of those that took longest.
        faults: Text about those that failed.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, seed: int, verdict: Verdict, seconds: float) -> None:
        """Count one more."""
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome != "exact":
            self.causes[f"{verdict.outcome}: {verdict.what}"] += 1
        self.slowest = sorted([*self.slowest, (seconds, seed)], reverse=True)[:SLOWEST]

    def merge(self, other: dict[str, Any]) -> None:
        """Add what another tally counted, given as :meth:`as_data`."""
        self.outcomes.update(other["outcomes"])
        self.causes.update(other["causes"])
        pairs = [*self.slowest, *map(tuple, other["slowest"])]
        self.slowest = sorted(pairs, reverse=True)[:SLOWEST]

    def as_data(self) -> dict[str, Any]:
        """The counts, as what can be sent between processes."""
        return {
            "outcomes": dict(self.outcomes),
            "causes": dict(self.causes),
            "slowest": [list(pair) for pair in self.slowest],
        }

    @property
    def refused(self) -> float:
        """The share of recipes that the library refused."""
        return self.outcomes["refused"] / max(1, self.outcomes.total())

    def lines(self) -> Iterable[str]:
        """A summary."""
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        yield f"{self.outcomes.total()}: {counts}"
        for cause, count in self.causes.most_common():
            yield f"{count:6d} {cause}"
        slowest = ", ".join(f"{seconds:.2f} s (seed {seed})" for seconds, seed in self.slowest)
        yield f"slowest: {slowest}"


def tally(draw: Callable[[int], Prepared], seeds: Iterable[int]) -> Tally:
    """Draw, judge and count; the first faults of each kind are shrunk."""
    from tests.nets.shrink import shrink
    from tests.nets.verdict import judge

    result = Tally()
    seen: Counter[str] = Counter()
    for seed in seeds:
        start = time.perf_counter()
        prepared = draw(seed)
        verdict = judge(prepared)
        result.add(seed, verdict, time.perf_counter() - start)
        if verdict.passes:
            continue
        seen[verdict.what] += 1
        if seen[verdict.what] > SHRUNK:
            result.faults.append(f"seed {seed}: {verdict.outcome}, {verdict.what}")
            continue
        prepared, verdict = shrink(prepared, verdict)
        result.faults.append(
            f"{prepared.recipe}\n{verdict.outcome}: {verdict.what}\n{verdict.details[-1500:]}\n"
            f"seed {seed}, shrunk to {prepared.recipe!r}\n"
        )
    return result
