"""The pytest plugin: keeps account of the checks of a run, and fails it where some vanished.

Active after ``pip install backpack-core[testing]``, without configuration. Costs nothing where no
test uses the kit: neither torch nor the rest of core is imported here.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import pytest

from backpack_core.testing.ledger import LEDGER

PROPERTY = "backpack_check"
PROMISES = "backpack_promises"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which check a test performed; a test that passed without calling its check failed."""
    report = yield
    check: Any = getattr(getattr(item, "callspec", None), "params", {}).get("check")
    if call.when == "call" and hasattr(check, "group"):
        if check.called:
            report.user_properties.append((PROPERTY, [*check.group, check.name]))
        elif report.passed:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} never called its check: write check() in its body."
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Cross off what was performed, here or in a worker process."""
    for name, value in report.user_properties:
        if name == PROPERTY:
            test, case, check = cast("tuple[str, str, str]", value)
            LEDGER.perform((test, case), check)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over the promises of a worker process (pytest-xdist)."""
    LEDGER.load(getattr(node, "workeroutput", {}).get(PROMISES, ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a full run in which promised checks did not happen."""
    workeroutput = getattr(session.config, "workeroutput", None)
    if workeroutput is not None:
        workeroutput[PROMISES] = LEDGER.dump()
    elif exitstatus == pytest.ExitCode.OK and LEDGER.missing() and not _is_partial(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """State how many checks ran, and which did not."""
    if not LEDGER.promised:
        return
    cases, checks = LEDGER.counts()
    terminalreporter.write_line(f"conformance kit: {checks} checks of {cases} cases")
    missing = LEDGER.missing()
    if not missing:
        return
    count = sum(map(len, missing.values()))
    if _is_partial(config):
        terminalreporter.write_line(f"conformance kit: {count} promised checks were not selected")
        return
    terminalreporter.section("promised checks that did not run", red=True)
    for (test, case), names in missing.items():
        terminalreporter.write_line(f"{test} [{case}]: {', '.join(names)}")


def _is_partial(config: pytest.Config) -> bool:
    """Whether the user asked for a part of the tests."""
    options = ("keyword", "markexpr", "deselect", "lf", "collectonly", "maxfail", "stepwise")
    chosen = any(getattr(config.option, name, None) for name in options)
    return chosen or any("::" in str(argument) for argument in config.args)
