"""Processes of tests, forked from one that has imported torch: each of them saves that second.

Two servers, which start when they are first asked. One has imported torch alone, and runs scripts
as a fresh interpreter would. One has imported this library, too, and runs functions, as ranks of a
group.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

# Of a library, only what any process of it imports.
PRELOADED = ["torch.distributed.fsdp", "backpack_core.extensions", "backpack_data"]

SERVER = """
import json, os, sys, torch
assert not [name for name in sys.modules if name.startswith("backpack")]
for line in sys.stdin:
    source, environment, files = json.loads(line)
    child = os.fork()
    if not child:
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


def python(source: str, **environment: str) -> str:
    """Run a script in a process of its own that has imported torch; its standard output."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said, errors = (Path(folder) / name for name in ("out", "err"))
        files = str(said), str(errors)
        server.stdin.write(json.dumps([source, {**os.environ, **environment}, files]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        assert status == 0, errors.read_text()
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


def run_ranks(function: Callable[..., object], *arguments: Any, ranks: int = 2) -> None:
    """Run a function in several processes, which it is told the number of first.

    Raises:
        Exception: Whatever one of them raises.
    """
    _context()
    torch.multiprocessing.start_processes(function, arguments, ranks, start_method="forkserver")
