"""Loads plugins in other processes, so that their faults do not affect this one."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from backpack_core.cli import output
from backpack_core.cli.reports import Provided, Report
from backpack_core.discovery import Plugin
from backpack_core.errors import PluginError

WORKER = Path(__file__).with_name("worker.py")
START_LIMIT = 120.0  # seconds to start Python, import torch and read metadata


def load_isolated(plugins: list[Plugin], limit: float) -> list[Report]:
    """Load plugins in other processes, with a progress bar on a terminal.

    Args:
        plugins: All installed plugins.
        limit: Seconds that one plugin may take.

    Returns:
        One report for each plugin, in order.

    Raises:
        PluginError: The other process could not be started.
    """
    with output.bar("Loading plugins", len(plugins)) as advance:
        return _load(plugins, limit, advance)


def _load(plugins: list[Plugin], limit: float, advance: Callable[[], None]) -> list[Report]:
    reports: dict[tuple[str, str], Report] = {}
    waiting = [(p.distribution, p.name) for p in plugins]
    culprits: list[tuple[str, str]] = []
    by_identity = {(p.distribution, p.name): p for p in plugins}
    while any(identity not in reports for identity in waiting):
        worker = _Worker(culprits, reports, limit, advance)
        culprit = worker.run()
        if culprit is None:
            break
        culprits.append(culprit)
        reports[culprit] = Report.of(
            by_identity[culprit],
            "hangs" if worker.timed_out else "died",
            message=f"exit code {worker.exit_code}",
            seconds=worker.waited,
        )
    return [reports[identity] for identity in waiting if identity in reports]


class _Worker:
    """One run of the worker process, until it is done or a plugin ends it."""

    def __init__(
        self,
        skip: list[tuple[str, str]],
        reports: dict[tuple[str, str], Report],
        limit: float,
        advance: Callable[[], None],
    ) -> None:
        self.advance = advance
        self.skip = skip
        self.reports = reports
        self.limit = limit
        self.timed_out = False
        self.exit_code: int | None = None
        self.waited = 0.0

    def run(self) -> tuple[str, str] | None:
        """Collect reports. Returns the plugin that ended the process, or ``None``."""
        process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            json.dump({"path": sys.path, "skip": self.skip}, process.stdin)
            process.stdin.close()
            return self._listen(_lines(process.stdout), process)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def _listen(
        self, lines: queue.Queue[str | None], process: subprocess.Popen[str]
    ) -> tuple[str, str] | None:
        current: tuple[str, str] | None = None
        while True:
            limit = max(START_LIMIT, self.limit) if current is None else self.limit
            since = time.perf_counter()
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                self.timed_out, line = True, None
            self.waited = time.perf_counter() - since
            if line is None:
                if not self.timed_out:
                    self.exit_code = process.wait()
                if current is None:
                    raise PluginError(f"No plugin is loaded: {self._complaint(process, limit)}")
                return current
            message = json.loads(line)
            if "begin" in message:
                current = tuple(message["begin"])
            elif "end" in message:
                report = _report(message["end"])
                if report.identity not in self.skip:
                    self.reports[report.identity] = report
                    self.advance()
                current = None
            elif "done" in message:
                return None

    def _complaint(self, process: subprocess.Popen[str], limit: float) -> str:
        if self.timed_out:
            return f"the process did not start in {limit:g} s; --limit {10 * limit:g} waits longer."
        assert process.stderr is not None
        return process.stderr.read().strip() or f"the process ended with code {self.exit_code}."


def _lines(stream: IO[str]) -> queue.Queue[str | None]:
    """A queue of a stream's lines, with ``None`` at its end. Unlike the stream, it has timeouts."""
    lines: queue.Queue[str | None] = queue.Queue()

    def pump() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    return lines


def _report(fields: dict[str, Any]) -> Report:
    fields["provides"] = [Provided(**item) for item in fields["provides"]]
    return Report(**fields)
