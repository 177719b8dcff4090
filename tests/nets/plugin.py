"""Options of the random nets, and the summary at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nets.report import Tally


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random nets")
    group.addoption("--nets", type=int, default=300, help="number of random nets")
    group.addoption("--traps", type=int, default=0, help="number of random nets with a trap")
    group.addoption("--seed", type=int, default=0, help="seed of the first of them")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kind in ("nets", "traps"):
        total = Tally()
        for outcome in ("passed", "failed"):
            for report in terminalreporter.getreports(outcome):
                found = dict(getattr(report, "user_properties", ())).get(kind)
                if found is not None and report.when == "call":
                    total.merge(found)
        if total.outcomes:
            terminalreporter.section(f"random {kind}")
            for line in total.lines():
                terminalreporter.line(line)
