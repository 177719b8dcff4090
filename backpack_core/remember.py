"""A cache of answers about classes and functions that does not keep them alive.

A notebook's cell that runs again defines its classes anew; ``functools.cache`` would hold the old
ones and all they refer to. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def remembered(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """``functools.cache`` for a function of one object, with weak references to the objects."""
    known: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def look_up(key: Any) -> T:
        if key not in known:
            known[key] = function(key)
        return known[key]

    return look_up
