"""A pytest plugin that records which checks of the kit ran, for ``backpack certify``."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Module

from backpack_core.cli.provides import class_named, provided_by
from backpack_core.plugins import ensure_loaded, known_plugins
from backpack_core.plugins.registry import registry
from backpack_core.testing.cases import Case, installed
from backpack_core.testing.compare import closest
from backpack_core.testing.runner import BoundCheck

_KEY = "backpack check"
OPTION = "--backpack-ledger"


def pytest_addoption(parser: Any) -> None:
    """Add the option that says where to write."""
    parser.addoption(OPTION, type=Path, help="Write the checks that ran to this file.")


def pytest_configure(config: Any) -> None:
    """Register the ledger."""
    config.pluginmanager.register(Ledger(config.getoption(OPTION)), "backpack-ledger")


class Ledger:
    """Records the checks. With several processes, the first one collects and writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Any] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        """Attach a check's entry to its report, unless the check was skipped."""
        report = yield
        check = getattr(item, "callspec", None) and item.callspec.params.get("check")
        if call.when == "call" and isinstance(check, BoundCheck):
            status = "expected failure" if hasattr(report, "wasxfail") else report.outcome
            if status == "skipped":
                return report
            about = item.callspec.id.removesuffix(f"-{check.check.name}"), check.check.name, status
            classes = _classes_of(check.case)
            report.user_properties.append((_KEY, [classes, *about, dict(closest)]))
            closest.clear()
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Collect the entry."""
        if report.when == "call":
            self.found += [value for key, value in report.user_properties if key == _KEY]

    def pytest_sessionfinish(self) -> None:
        """Write all entries, and what the installed plugins provide."""
        ensure_loaded()
        self.path.write_text(json.dumps([self.found, provided_by(known_plugins())]), "utf-8")


def _classes_of(case: Case) -> list[str]:
    """The rule of a case, or its extension and propagator, as entry points name them."""
    made: Any = case.make()
    with installed(case):
        is_module = isinstance(made, Module)
        checked = [registry.resolve(made).rule] if is_module else [made, made.propagator]
    return [class_named(one) for one in checked]
