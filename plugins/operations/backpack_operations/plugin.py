"""What this library attaches to passes of core."""

from __future__ import annotations

from backpack_core import hookimpl
from backpack_operations.between import Operations


@hookimpl
def backpack_operation() -> type[Operations]:
    """It goes through operations between calls."""
    return Operations
