"""A cache for functions of a class or function, which does not keep its keys alive.

A notebook's cell that runs again defines its classes anew. ``functools.cache`` would keep the old
classes, and everything that they refer to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def remembered(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """``functools.cache`` for a function of one argument, with weak references to the arguments."""
    cache: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def look_up(key: Any) -> T:
        if key not in cache:
            cache[key] = function(key)
        return cache[key]

    return look_up
