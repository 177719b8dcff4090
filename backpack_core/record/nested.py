"""Finds tensors inside the arguments and return values of modules.

They may be nested in tuples, lists, dicts, dataclasses, and distributions of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module

from backpack_core.remember import remembered


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nested structure, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in items_of(value):
            yield from iter_tensors(item)


def items_of(value: Any) -> Iterable[Any]:
    """The items of a container, or the attributes of an object that may hold tensors."""
    if isinstance(value, (tuple, list)):
        return value
    return value.values() if isinstance(value, dict) else attributes_of(value).values()


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of a dataclass or a distribution; none of other objects."""
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
