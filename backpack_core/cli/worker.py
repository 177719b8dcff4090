"""Loads plugins in a process of its own, and reports on each to the parent process.

Run as a script by :mod:`backpack_core.cli.processes`. It reads a JSON object from standard input,
and writes a line of JSON before and after each plugin. So the parent knows the name of a plugin
that hangs or ends the process. What plugins print is redirected.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from typing import IO, Any


def main() -> None:
    """Load every plugin except those to be skipped."""
    request: dict[str, Any] = json.load(sys.stdin)
    sys.path[:] = request["path"]
    channel, captured = _redirect()

    def tell(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    from backpack_core import plugins
    from backpack_core.cli.inspection import report

    skipped = {tuple(identity) for identity in request["skip"]}
    started, position = 0.0, 0

    def before(plugin: plugins.Plugin) -> None:
        nonlocal started, position
        if (plugin.distribution, plugin.name) in skipped:
            plugin.state = "blocked"
        tell(begin=[plugin.distribution, plugin.name])
        started, position = time.perf_counter(), captured.seek(0, os.SEEK_END)

    def after(plugin: plugins.Plugin) -> None:
        seconds = time.perf_counter() - started
        sys.stdout.flush()
        captured.seek(position)
        output = captured.read().decode(errors="replace")
        result = report(plugin)
        result.seconds, result.output = seconds, output
        tell(end=asdict(result))

    tell(ready=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # only now: the parent shows errors before this
    plugins.load_all(after, before)
    tell(done=True)
    os._exit(0)  # does not wait for threads that plugins started


def _redirect() -> tuple[IO[str], IO[bytes]]:
    """Keep the channel to the parent; send what plugins print to a file; give them no input."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    captured = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
    os.dup2(captured.fileno(), 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return channel, captured


if __name__ == "__main__":
    main()
