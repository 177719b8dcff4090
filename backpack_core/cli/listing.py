"""The rows of ``backpack plugins``. Imports neither torch nor plugins in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from backpack_core.cli.certificate import Standing
from backpack_core.cli.processes import load_isolated
from backpack_core.cli.reports import Report
from backpack_core.discovery import State, discover

HEADER = ("plugin", "distribution", "version", "provides", "state")


def collect(load: bool, limit: float) -> list[Report]:
    """One report for each installed plugin.

    Args:
        load: Whether to load the plugins, in other processes.
        limit: Seconds that one plugin may take.
    """
    plugins = discover()
    return load_isolated(plugins, limit) if load else [Report.of(plugin) for plugin in plugins]


def worst(standings: Iterable[Standing]) -> Standing:
    """The standing of a distribution, which is the worst one of its packages."""
    return max(standings, key=get_args(Standing).index)


FOLDED = ("distribution", "version", "provides", "state", "certificate")


def folded(reports: list[Report]) -> list[tuple[str, ...]]:
    """A row for each distribution, with its number of entry points of each kind, by names."""
    by_who: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        by_who.setdefault((report.distribution, report.version), []).append(report)
    return [
        (
            *who,
            _counted(map(_kind, own_reports)),
            _counted(report.state for report in own_reports),
            worst(report.standing for report in own_reports),
        )
        for who, own_reports in by_who.items()
    ]


def _kind(report: Report) -> str:
    name = report.value.rpartition(":")[2]
    if ":" not in report.value:
        return "module"
    return "rule" if name.endswith("Rule") else "extension or propagator"


def _counted(words: Iterable[str]) -> str:
    """``"70 rules, 2 modules"``; a state that is the same for all is written without a number."""
    counts = Counter(words)
    if len(counts) == 1 and next(iter(counts)) in get_args(State):
        return next(iter(counts))
    return ", ".join(f"{n} {_plural(word, n)}" for word, n in counts.items())


def _plural(word: str, number: int) -> str:
    if word in get_args(State) or number == 1:
        return word
    return "extensions and propagators" if " or " in word else f"{word}s"


def rows(reports: list[Report]) -> list[tuple[str, ...]]:
    """A row for each thing that a plugin provides; its entry point if it is not loaded."""
    return [
        (r.name, r.distribution, r.version, text, r.state)
        for r in reports
        for text in ([*map(str, r.provides)] or [r.value])
    ]
