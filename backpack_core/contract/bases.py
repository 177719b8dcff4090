"""The base classes that plugins derive from: core's own, and those that libraries add for authors.

What a plugin's class declares is judged by them, and what they do themselves needs nobody to watch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

C = TypeVar("C", bound=type)

NAMES: Final = "names of parameters", lambda item: isinstance(item, str) and bool(item)
# The types of the entries of declared tuples: in words, and a function that accepts one.
ITEMS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {"params": NAMES}

BASES: Final[dict[type, None]] = {}  # in the order in which they were defined


def base(cls: C) -> C:
    """Mark a class as one that plugins derive from."""
    BASES[cls] = None
    return cls


def declared(cls: type) -> dict[str, Any]:
    """What the author's classes declare, the most special class last."""
    own = [c for c in cls.__mro__[::-1] if c not in BASES]
    return {name: value for c in own for name, value in vars(c).items() if name[:2] != "__"}


def is_of_base(function: Any) -> bool:
    """Whether a function was written beside a base class; a wrapper does not take its place."""
    written = getattr(function, "__globals__", {}).get("__name__")
    return any(cls.__module__ == written for cls in BASES)
