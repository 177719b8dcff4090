"""Where implementations of checks are entered under their names. Imports the promise only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backpack_core.testing.promise import PROMISED

Check = Callable[[Any], None]

IMPLEMENTED: dict[str, Check] = {}


def implements(check: Check, name: str = "") -> Check:
    """Enter a function as the implementation of the promised check of its name.

    Args:
        check: Takes a case; raises where it finds a fault.
        name: The check's name, where it is not the function's.

    Raises:
        LookupError: No such check is promised, or it is implemented already.
    """
    name = name or check.__name__
    promised = {row.name for rows in PROMISED.values() for row in rows}
    if name not in promised or name in IMPLEMENTED:
        raise LookupError(f"{name!r} is not promised, or implemented twice.")
    IMPLEMENTED[name] = check
    return check
