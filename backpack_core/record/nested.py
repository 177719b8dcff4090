"""Finds and maps tensors inside the arguments and return values of modules.

They may be nested in tuples, lists, dicts, dataclasses, and distributions of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module

from backpack_core.remember import remembered


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
    attributes = _attributes(value)
    if not attributes:
        return value
    mapped = copy(value)
    for name, item in attributes.items():
        object.__setattr__(mapped, name, map_tensors(item, function))  # a dataclass may be frozen
    return mapped


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nested structure, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value):
            yield from iter_tensors(item)


def placed_tensors(value: Any, *path: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Every tensor, with its path: the index of the item that it lies in, at each level."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for number, item in enumerate(_items(value)):
            yield from placed_tensors(item, *path, number)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        return value
    return value.values() if isinstance(value, dict) else _attributes(value).values()


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of a dataclass or distribution; nothing for other objects."""
    if isinstance(value, Distribution):
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return {}


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Every tensor among the arguments of a call, positional ones first."""
    is_single = len(args) == 1 and isinstance(args[0], Tensor)  # nearly always
    if not kwargs and (is_single or not [a for a in args if not isinstance(a, Tensor)]):
        return args
    return (*iter_tensors(args), *iter_tensors(kwargs))


def in_order(module: Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order in which ``forward`` declares them."""
    kind: Any = type(module)
    order = _parameter_names(kind)
    return dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))


@remembered
def _parameter_names(kind: type[Module]) -> dict[str, int]:
    names = inspect.signature(kind.forward).parameters
    return {name: position for position, name in enumerate(names)}
