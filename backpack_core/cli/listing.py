"""Rows of ``backpack plugins``. Imports neither torch nor plugins; another process may."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from backpack_core.cli.isolation import load_isolated
from backpack_core.cli.reports import Report
from backpack_core.plugins.discovery import Plugin, discover, preferred_by_environment

HEADER = ("plugin", "distribution", "version", "provides", "state")


def collect(load: bool, limit: float) -> list[Report]:
    """One report for each installed plugin.

    Args:
        load: Whether to load them too, in other processes.
        limit: Seconds that one plugin may take.
    """
    if load:
        return load_isolated(installed(), limit)
    return [Report(p.name, p.value, p.distribution, p.version, p.state) for p in installed()]


def installed() -> list[Plugin]:
    """All installed plugins."""
    preferred = preferred_by_environment()
    return discover(lambda key: preferred.get(key) or preferred.get("*", ""))


def rows(reports: list[Report]) -> list[tuple[str, ...]]:
    """Cells for a table: what a plugin provides, or what it names as long as it is not loaded."""
    return [
        (r.name, r.distribution, r.version, text, r.state)
        for r in reports
        for text in (_provides(r) or [r.value])
    ]


def _provides(report: Report) -> list[str]:
    return [
        f"{p.kind} {p.key}" + (f", saved as {p.detail}" if p.detail else "")
        for p in report.provides
    ]


def as_json(reports: list[Report]) -> list[dict[str, Any]]:
    """The reports as plain data."""
    return [asdict(report) for report in reports]
