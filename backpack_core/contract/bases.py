"""The base classes that plugins derive from: core's own, and those that libraries add for authors.

What a plugin's class declares is judged by them, and what they do themselves needs nobody to watch.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

C = TypeVar("C", bound=type)

BASES: Final[dict[type, None]] = {}  # in the order in which they were defined


def base(cls: C) -> C:
    """Mark a class as one that plugins derive from."""
    BASES[cls] = None
    return cls


def is_of_base(function: Any) -> bool:
    """Whether a function was written beside a base class; a wrapper does not take its place."""
    written = getattr(function, "__globals__", {}).get("__name__")
    return any(cls.__module__ == written for cls in BASES)
