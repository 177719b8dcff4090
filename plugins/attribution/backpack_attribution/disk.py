"""Files that are whole or absent: written under another name, flushed, and renamed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4
from weakref import WeakSet

import torch
from safetensors.torch import save_file
from torch import Tensor

from backpack_core.errors import UsageError

VERSION = 1
UNFINISHED = ".unfinished"  # names of files end with this while they are written


def atomically(path: Path, fill: Callable[[Path], object]) -> None:
    """Write a file under another name, flush it to disk, and rename it.

    So readers always see the whole earlier file or the whole new one, even after a crash.

    Args:
        path: The file; an earlier one is replaced.
        fill: Writes the file at the path that it is given.
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}{UNFINISHED}")
    try:
        fill(beside)
        _flush(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _flush(path.parent)  # the folder holds the name


def write(path: Path, tensors: Mapping[str, Tensor], kind: str, about: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically.

    Args:
        path: The file.
        tensors: Tensors by name; contiguous copies on the CPU are written.
        kind: What the file holds.
        about: Further values for its header, as JSON.
    """
    header = {"version": VERSION, "kind": kind, **about}
    packed = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    atomically(path, lambda p: save_file(packed, p, {"backpack_attribution": json.dumps(header)}))


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    text = json.dumps(value, indent=2)
    atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


class Lock:
    """Keeps other processes out of a folder, until it is given back or the process has ended.

    On Windows, on file systems without locks, and where the file cannot be opened (in a folder that
    is only read), it keeps nobody out.
    """

    def __init__(self, path: Path) -> None:
        """Lock a file.

        Args:
            path: The file; it is made, and stays.

        Raises:
            UsageError: Another process has locked it.
        """
        self._file: IO[bytes] | None = None
        for mode in ("ab", "rb"):  # another user may own it, and locks need no right to write
            with suppress(OSError):
                self._file = self._file or path.open(mode)
        if sys.platform != "win32" and self._file is not None:
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.close()
                raise UsageError(
                    f"Another writer is at work in {path.parent}, and both would store the same "
                    "samples. Wait until it has finished, or give another folder; processes of one "
                    "run need different numbers, GradientStore(..., process=...)."
                ) from error
            except OSError:
                pass
        _held.add(self)

    def give_back(self) -> None:
        """Let others in."""
        if self._file is not None:
            self._file.close()


_held: WeakSet[Lock] = WeakSet()


def _leave_to_parent() -> None:
    """Close the files in a process that was forked: a lock lasts while any process has it open."""
    for lock in [*_held]:
        lock.give_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _flush(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
