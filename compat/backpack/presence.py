"""Warns if the incumbent is installed, too. Imports backpack_core."""

from __future__ import annotations

import warnings

from backpack_compat.namesakes import namesakes
from backpack_core.errors import BackpackWarning


def warn_about_incumbent() -> None:
    """Say which of the two packages named ``backpack`` is active, and how to choose."""
    found = namesakes()
    if found is not None:
        warnings.warn(f"{found[0]}. {found[1]}", BackpackWarning, stacklevel=3)
