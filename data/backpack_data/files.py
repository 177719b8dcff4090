"""Files in the format of safetensors, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from backpack_core.errors import UsageError

VERSION = 1


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a file beside, have it on the disk, and put it into the place of an earlier one.

    Args:
        path: Where to.
        tensors: By name; they may share no memory.
        about: What goes into the header, as JSON.
    """
    header = {"backpack_data": json.dumps({"version": VERSION, **about})}
    data = save({name: _packed(t) for name, t in tensors.items()}, header)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _packed(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own, in the usual order."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and what its header says.

    Raises:
        UsageError: The file is of somebody else, or of a later version.
    """
    with safe_open(path, "pt") as file:
        header = (file.metadata() or {}).get("backpack_data")
        about = {} if header is None else json.loads(header)
        if about.get("version") != VERSION:
            raise UsageError(
                f"{path} was not written by this version of backpack_data: found version "
                f"{about.get('version')!r}, expected {VERSION}. Give another path."
            )
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
