"""Processes of tests, forked from one that has imported torch: each of them saves that second.

Two servers, which start when they are first asked. One has imported torch alone, and runs scripts
as a fresh interpreter would. The other has loaded this library's plugins, too, and runs functions,
as ranks of a group. No wait is without a limit: a process that hangs fails its test, and the tests
go on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing
from torch import distributed

PRELOADED = ["tests.preloaded"]

LIMIT = 300  # seconds that a process may take

SERVER = """
import json, os, signal, sys, torch
assert not [name for name in sys.modules if name.startswith("backpack")]
for line in sys.stdin:
    source, environment, files, limit = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(limit)
        for number, name in enumerate(files, 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        exec(compile(source, "<script>", "exec"), {"__name__": "__main__"})
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def python(source: str, limit: int = LIMIT, **environment: str) -> str:
    """Run a script in a process of its own that has imported torch; its standard output.

    Args:
        source: The script.
        limit: Seconds that it may take.
        environment: Variables, beside those of this process.

    Raises:
        AssertionError: The script failed, or took longer; or the server has ended.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said, errors = (Path(folder) / name for name in ("out", "err"))
        asked = source, {**os.environ, **environment}, (str(said), str(errors)), limit
        with suppress(BrokenPipeError):
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            _server.cache_clear()
            with server, suppress(BrokenPipeError):  # which closes its pipes
                pass
            raise AssertionError(f"The server has ended with {server.returncode}; see its errors.")
        status = int(answer)
        ended = f"took {limit} seconds" if status == -signal.SIGALRM else f"ended with {status}"
        assert status == 0, f"The script {ended}: {errors.read_text()}"
        return said.read_text()


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(function: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """Run a function of a module in a process of its own."""
    process = _context().Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def run_ranks(
    function: Callable[..., object], *arguments: Any, ranks: int = 2, limit: float = LIMIT
) -> None:
    """Run a function in several processes, which it is told the number of first.

    Args:
        function: Of a module.
        arguments: What it is told next.
        ranks: How many processes.
        limit: Seconds that they may take.

    Raises:
        Exception: Whatever one of them raises.
        TimeoutError: They took longer.
    """
    _context()
    started = torch.multiprocessing.start_processes(
        function, arguments, ranks, join=False, start_method="forkserver"
    )
    end = time.monotonic() + limit
    while not started.join(timeout=max(0.0, end - time.monotonic())):
        if time.monotonic() >= end:
            waiting = [rank for rank, each in enumerate(started.processes) if each.is_alive()]
            for each in started.processes:
                each.kill()
            raise TimeoutError(f"Ranks {waiting} were not through after {limit} seconds.")


def on_ranks(
    function: Callable[..., object], folder: Path, *arguments: Any, ranks: int = 2
) -> list[Any]:
    """What a function returns on each rank of a group of processes, in double precision.

    Args:
        function: Of a module. It is told its rank first.
        folder: An empty folder.
        arguments: What it is told next.
        ranks: How many processes.
    """
    run_ranks(_in_group, function, folder, arguments, ranks, ranks=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _in_group(
    rank: int, function: Callable[..., object], folder: Path, arguments: Any, ranks: int
) -> None:
    torch.set_default_dtype(torch.float64)
    store, limit = f"file://{folder}/store", timedelta(seconds=60)
    distributed.init_process_group("gloo", store, limit, world_size=ranks, rank=rank)
    torch.save(function(rank, *arguments), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
