"""Files in the safetensors format, written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from backpack_core.errors import UsageError

VERSION = 1


def joined(*parts: object) -> str:
    """The name of a tensor; a part may hold any character, like the path of a module."""
    return "|".join(quote(str(part)) for part in parts)


def parts_of(name: str) -> list[str]:
    """The reverse of :func:`joined`."""
    return [unquote(part) for part in name.split("|")]


def write(path: Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a temporary file, flush it to disk, and rename it to the path.

    Args:
        path: Of the file; an earlier one is replaced.
        kind: What it holds.
        tensors: Tensors by name.
        about: Further values for the header, as JSON.
    """
    header = {"backpack_data": json.dumps({"version": VERSION, "kind": kind, **about})}
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
    """A contiguous copy on the CPU."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and what its header says.

    Raises:
        UsageError: Another program or a later version wrote the file, or it is of another kind.
    """
    wanted = {"version": VERSION, "kind": kind}
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get("backpack_data")
            about = {} if header is None else json.loads(header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UsageError(
            f"{path} is not a file of backpack_data, or is damaged ({error}). Give another path."
        ) from error
    found = {key: about.get(key) for key in wanted}
    if found != wanted:
        raise UsageError(
            f"{path} is another kind of file than expected: expected {wanted}, found {found}. "
            "Files of accumulate(..., state_file=...) and files of save(...) are two kinds. "
            "Give another path."
        )
    return tensors, about
