"""Torch's checkpoints give each saved tensor once: has them give it to us, and to autograd.

Their private interface is used here, as the rest of torch's is in ``_torch.py``; where it is no
longer offered, a checkpoint gives once, and says so. Imports ``_torch`` only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from backpack_core._torch import Node

_unpacking = threading.local()


class _Unpacked(dict[Any, Any]):
    """Where a checkpoint notes what it has given: for :func:`unpacking_again`, it is not noted."""

    def __setitem__(self, task: Any, handle: Any) -> None:
        if handle is not None or not getattr(_unpacking, "again", False):
            super().__setitem__(task, handle)


class _Holder(getattr(torch_checkpoint, "_Holder", object)):  # type: ignore[misc]
    """What a checkpoint keeps in the place of a saved tensor."""

    is_used = False

    def __init__(self) -> None:
        super().__init__()
        self.handles = _Unpacked()
        _Holder.is_used = True


def let_checkpoints_give_again() -> None:
    """Have later checkpoints (not re-entrant ones) give saved tensors to us and to autograd."""
    if hasattr(torch_checkpoint, "_Holder"):
        torch_checkpoint._Holder = _Holder  # type: ignore[misc]


@cache
def _saved_by(kind: type) -> tuple[str, ...]:
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return (*names, "saved_tensors") if hasattr(kind, "saved_tensors") else tuple(names)


@contextmanager
def unpacking_again(node: Node) -> Iterator[None]:
    """What a node saved is asked for, and will be once more: a checkpoint holds it until then.

    The checkpoint runs its function at the first time. That is now, and not under vmap.
    """
    before = getattr(_unpacking, "again", False)
    _unpacking.again = True
    try:
        for name in _saved_by(type(node)) if _Holder.is_used else ():
            with suppress(RuntimeError):  # it was freed: what asks for it says so
                getattr(node, name)
        yield
    finally:
        _unpacking.again = before
