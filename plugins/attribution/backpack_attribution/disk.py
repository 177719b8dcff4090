"""Files that are whole or absent: written under another name, flushed, and renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

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


def _flush(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
