"""Turns ``torch.compile`` off inside ``backpack(...)``, where compiled functions run eagerly.

A compiled graph has no modules that could be recorded. Outside the blocks, our hooks are invisible
to the compiler, so an extended model is compiled as if it were not extended.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from backpack_core.errors import UsageError


def refuse_inside() -> None:
    """Raise an error if the compiler is tracing the code that calls this."""
    if torch.compiler.is_compiling():
        raise RuntimeError(_INSIDE)  # the compiler can report this type


class _Uncompiled:
    """A ``with`` block in which compiled functions run eagerly.

    Several threads may be inside at once. Torch has one switch for all threads, so other threads
    run eagerly in the meantime, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        """Turn the compiler off, if it was ever imported.

        Raises:
            UsageError: The block is entered in compiled code.
        """
        with self._lock:
            if not self._inside and "torch._dynamo" in sys.modules:
                try:
                    self._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    raise UsageError(_INSIDE) from error
            self._inside += 1

    def __exit__(self, *exc_info: object) -> None:
        """Turn the compiler on again when the last thread has left."""
        with self._lock:
            self._inside -= 1
            if not self._inside and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


_INSIDE = (
    "backpack(...) was entered inside a function that torch.compile compiles: backward passes with "
    "extensions are not compiled. Compile the model, or the code outside the block."
)
_uncompiled = _Uncompiled()


def uncompiled() -> AbstractContextManager[None]:
    """A ``with`` block in which functions of ``torch.compile`` run eagerly.

    For a forward pass before a ``backpack(...)`` block, which is such a block itself: a compiled
    graph has no modules that could be recorded.
    """
    return _uncompiled
