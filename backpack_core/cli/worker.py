"""Loads plugins in a process of its own, and reports on each to the parent process.

It sends JSON, so that the parent imports nothing of a plugin. What plugins print is redirected.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any


def main(channel: Any, culprits: Iterable[int]) -> None:
    """Load every plugin, and report on each; before that, send an empty message.

    Args:
        channel: The end of a pipe to the parent process.
        culprits: Positions of plugins that are not loaded.
    """
    from backpack_core import plugins
    from backpack_core.cli.inspection import report
    from backpack_core.discovery import Plugin

    installed = plugins.known_plugins()  # reads metadata, which is no plugin's time
    for number in culprits:
        installed[number].state = "blocked"
    captured = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the process
    os.dup2(captured.fileno(), 1)
    channel.send_bytes(b"")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # only now: errors before this are shown
    started = time.perf_counter()

    def printed() -> str:
        """What was printed since the last call."""
        sys.stdout.flush()
        captured.seek(0)
        text = captured.read().decode(errors="replace")
        captured.seek(0)
        captured.truncate()
        return text

    def tell(plugin: Plugin) -> None:
        nonlocal started
        seconds, output = time.perf_counter() - started, printed()
        result = report(plugin)
        result.seconds, result.output = seconds, output
        printed()  # by what it names, which was imported for the report
        channel.send_bytes(json.dumps(asdict(result)).encode())
        started = time.perf_counter()

    plugins.load_all(tell)
