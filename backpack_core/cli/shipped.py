"""Finds files that are shipped with the package."""

from __future__ import annotations

from pathlib import Path

from backpack_core.errors import BackpackError


def shipped(inside: str, beside: str) -> Path:
    """The path of a file in the installed package, or next to it in a checkout.

    Args:
        inside: Its path in the package.
        beside: Its path in a checkout.

    Raises:
        BackpackError: It is in neither.
    """
    package = Path(__file__).parents[1]
    for path in (package / inside, package.parent / beside):
        if path.is_file():
            return path
    raise BackpackError(f"{inside} is missing from this installation of backpack-core.")
