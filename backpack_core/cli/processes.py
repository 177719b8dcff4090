"""Loads plugins in other processes, so that their faults do not affect this one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from backpack_core.cli import output, worker
from backpack_core.cli.reports import Provided, Report
from backpack_core.discovery import Plugin
from backpack_core.errors import PluginError

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
    return [*output.track(_reports(plugins, limit), "Loading plugins", len(plugins))]


def _reports(plugins: list[Plugin], limit: float) -> Iterator[Report]:
    """The reports, in order. After a plugin that ends its process, another process goes on."""
    culprits: list[int] = []
    told = 0
    while told < len(plugins):
        with _worker(culprits) as (process, channel):
            _require_start(process, channel, max(START_LIMIT, limit))
            for number, plugin in enumerate(plugins):
                since = time.perf_counter()
                end, message = _next_message(process, channel, limit)
                if end:
                    culprits.append(number)
                    code, seconds = f"exit code {process.exitcode}", time.perf_counter() - since
                    report = Report.of(plugin, end, message=code, seconds=seconds)
                else:
                    report = _report(json.loads(message))
                if number == told:  # others were reported from an earlier process
                    told += 1
                    yield report
                if end:
                    break


@contextmanager
def _worker(culprits: list[int]) -> Iterator[tuple[Any, Any]]:
    """A process that loads plugins except some, and the channel on which it reports."""
    context = get_context("spawn")
    channel, its_end = context.Pipe(duplex=False)
    process = context.Process(target=worker.main, args=(its_end, culprits))
    process.start()
    its_end.close()
    try:
        yield process, channel
    finally:
        process.kill()
        process.join()
        channel.close()


def _require_start(process: Any, channel: Any, limit: float) -> None:
    """Wait until all is imported that plugins need; Python prints why that fails."""
    end, _ = _next_message(process, channel, limit)
    if end:
        started = f"the process did not start in {limit:g} s; --limit {10 * limit:g} waits longer."
        ended = f"the process ended with code {process.exitcode}."
        raise PluginError(f"No plugin is loaded: {started if end == 'hangs' else ended}")


def _next_message(process: Any, channel: Any, limit: float) -> tuple[str, bytes]:
    """What is wrong with a process (``"hangs"`` or ``"died"``), and else what it says next."""
    try:
        return ("", channel.recv_bytes()) if channel.poll(limit) else ("hangs", b"")
    except (EOFError, OSError):
        process.join()
        return "died", b""


def _report(fields: dict[str, Any]) -> Report:
    fields["provides"] = [Provided(**item) for item in fields["provides"]]
    return Report(**fields)
