"""What this library attaches to passes of core."""

from __future__ import annotations

from typing import Any

from backpack_core import hookimpl


@hookimpl
def backpack_storage() -> Any:
    """Nothing yet."""
