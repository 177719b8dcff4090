"""Passes of autograd that no block of ``backpack(...)`` attends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from backpack_core.engine.active import stacks


@contextmanager
def suspended() -> Iterator[None]:
    """A block in which no context is active on this thread."""
    ident = threading.get_ident()
    stack = stacks.pop(ident, None)
    try:
        yield
    finally:
        if stack is not None:
            stacks[ident] = stack
