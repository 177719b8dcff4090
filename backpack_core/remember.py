"""Answers about classes and functions, kept no longer than these live. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def remembered(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """``functools.cache`` for a function of one object, which it does not keep alive.

    A class that is defined anew with every run of a notebook's cell holds the cell's variables.
    """
    known: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def look_up(key: Any) -> T:
        if key not in known:
            known[key] = function(key)
        return known[key]

    return look_up
