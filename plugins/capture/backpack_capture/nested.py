"""Tensors in nested values: taken out, and put in again.

An object consists of its attributes, and is made again without a call of its ``__init__``. An
object that holds code is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

Rebuild = Callable[[Sequence[Any]], Any]

_PLAIN: Final = (int, float, bool, complex, str, bytes, type(None))
LONGEST: Final = 2**16  # bytes of an array
_PLAIN_OF_TORCH: Final = (torch.dtype, torch.device, torch.layout, torch.Size)


class HoldsCode(Exception):
    """A value cannot be taken apart."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, or the like."""
    return type(value) in _PLAIN or isinstance(value, _PLAIN_OF_TORCH)


def is_short_array(value: Any) -> bool:
    """Whether a value is an array or a number of NumPy, not too long to be compared each time."""
    return type(value).__module__ == "numpy" and getattr(value, "nbytes", LONGEST + 1) <= LONGEST


class Apart:
    """A value with its tensors replaced by numbers.

    Attributes:
        tensors: The tensors, each once.
        form: Everything else, equal for equal values.
    """

    def __init__(self, value: Any) -> None:
        """Take a value apart.

        Raises:
            HoldsCode: The value holds functions, modules, or objects without readable attributes.
        """
        self.tensors: list[Tensor] = []
        self._known: dict[int, tuple[Any, int, Rebuild]] = {}
        self._notes: list[Any] = []
        self._rebuild = self._take(value)
        self.form = tuple(self._notes)
        self._known.clear()

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """The value with other tensors."""
        return self._rebuild(tensors)

    def _take(self, value: Any) -> Rebuild:
        if is_plain(value):
            self._notes.append((type(value), repr(value)))
            return lambda tensors: value
        known = self._known.get(id(value))
        if known is not None:
            self._notes.append(known[1])
            return known[2]
        number = len(self._known)
        if isinstance(value, Tensor):
            place = len(self.tensors)
            self.tensors.append(value)
            self._notes.append(Tensor)
            rebuild: Rebuild = lambda tensors: tensors[place]  # noqa: E731
        else:
            rebuild = self._take_apart(value)
        self._known[id(value)] = value, number, rebuild
        return rebuild

    def _take_apart(self, value: Any) -> Rebuild:
        kind = type(value)
        if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            self._notes.append((kind, len(value)))
            parts = [self._take(item) for item in value]
            make = kind._make if hasattr(kind, "_make") else kind
            return lambda tensors: make([part(tensors) for part in parts])
        if kind is dict and all(map(is_plain, value)):
            self._notes.append((kind, *value))
            pairs = {name: self._take(item) for name, item in value.items()}
            return lambda tensors: {name: part(tensors) for name, part in pairs.items()}
        return self._take_object(value)

    def _take_attribute(self, value: Any) -> Rebuild:
        if isinstance(value, type):  # it names a kind of value, as the class of a value does
            self._notes.append(value)
            return lambda tensors: value
        return self._take(value)

    def _take_object(self, value: Any) -> Rebuild:
        kind: Any = type(value)
        has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
        is_list = isinstance(value, list)
        is_other = isinstance(value, (dict, set, tuple, torch.nn.Module, ModuleType, type))
        if callable(value) or not hasattr(value, "__dict__") or has_slots or is_other:
            raise HoldsCode(f"{kind.__name__}")
        self._notes.append((kind, *vars(value)))
        before = len(self.tensors)
        attributes = {name: self._take_attribute(item) for name, item in vars(value).items()}
        items = [self._take(item) for item in value] if is_list else []
        if len(self.tensors) == before and not is_list:
            return lambda tensors: value  # it has no new part

        def rebuild(tensors: Sequence[Any]) -> Any:
            new = kind.__new__(kind)
            new.__dict__.update({name: part(tensors) for name, part in attributes.items()})
            if is_list:
                new.extend([item(tensors) for item in items])
            return new

        return rebuild
