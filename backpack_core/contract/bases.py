"""The base classes that plugins derive from: core's own, and those that libraries add for authors.

What a plugin's class declares is judged by them, and what they do themselves needs nobody to watch.
A library that declares more adds a judge of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias, TypeVar

C = TypeVar("C", bound=type)

# Says what is wrong with a class, a sentence for each fault.
Judge: TypeAlias = Callable[[type], Iterable[str]]

BASES: Final[dict[type, None]] = {}  # in the order in which they were defined

JUDGES: Final[list[Judge]] = []


def base(cls: C) -> C:
    """Mark a class as one that plugins derive from."""
    BASES[cls] = None
    return cls


def judge(function: Judge) -> Judge:
    """Ask a function about every class that is registered."""
    JUDGES.append(function)
    return function


def is_of_base(function: Any) -> bool:
    """Whether a function was written beside a base class; a wrapper does not take its place."""
    written = getattr(function, "__globals__", {}).get("__name__")
    return any(cls.__module__ == written for cls in BASES)


def call_fault(function: Callable[..., Any], count: int) -> str:
    """Why a function cannot be called with so many arguments, or an empty string."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    return ""
