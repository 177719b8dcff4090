"""Tensors in nested containers: each replaced by another."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

from backpack_core.record.nested import attributes_of


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A copy of a structure with ``function`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(v, function) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(v, function) for v in value]
    if isinstance(value, dict):
        mapped = copy(value)  # a subclass may have attributes besides its items
        for key, item in value.items():
            mapped[key] = map_tensors(item, function)
        return mapped
    attributes = attributes_of(value)
    if not attributes:
        return value
    mapped = copy(value)
    for name, item in attributes.items():
        object.__setattr__(mapped, name, map_tensors(item, function))  # a dataclass may be frozen
    return mapped
