"""What this library attaches to core."""

from __future__ import annotations

from backpack_core import hookimpl
from backpack_interplay.storage import Interplay


@hookimpl
def backpack_storage() -> Interplay:
    """Where tensors are kept that torch itself does something with."""
    return Interplay()
