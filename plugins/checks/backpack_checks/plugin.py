"""What this library attaches to passes of core."""

from __future__ import annotations

from typing import Any

from backpack_checks.advice import backpack_validate as backpack_validate
from backpack_core import hookimpl


@hookimpl
def backpack_run(run: Any) -> Any:
    """Nothing yet."""
