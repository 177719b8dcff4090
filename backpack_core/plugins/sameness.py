"""Decides whether a subclass computes what its parent does, so that it can use the parent's rule.

Without this, a subclass with another ``forward`` would silently be differentiated like its parent.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch.nn import Module

from backpack_core._torch import class_of
from backpack_core.remember import remembered

# The methods between calling a module and its forward.
_CALLING = frozenset(
    {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"}
)


def is_same_map(kind: type[Module], parent: type) -> bool:
    """Whether ``forward``, and everything that it looks up on the module, are the parent's own.

    The answer is no if a weight became a property (as in a parametrization), or if a method that
    ``forward`` calls is overridden. A new method or another ``reset_parameters`` does not matter.
    """
    forward = getattr(kind, "forward", None)  # a class of torch.jit has none
    if forward is None or getattr(parent, "forward", None) is not forward:
        return False
    names = _looked_up(parent) | _CALLING
    below = kind.__mro__[: kind.__mro__.index(parent)]
    return not any(name in vars(cls) for cls in below for name in names)


@remembered
def same_maps(kind: type[Module]) -> tuple[type[Module], ...]:
    """The classes that may lend a class their rules: itself, then parents in order."""
    return (kind, *(parent for parent in kind.__mro__[1:] if is_same_map(kind, parent)))


@remembered
def attributes_behind(parent: type) -> Mapping[str, Any]:
    """What determines what a module class computes, by name, as the class has it when first seen.

    ``None`` stands for names that the class lacks. It may get a property of this name later.
    """
    return {n: _attribute(parent, n) for n in ("forward", *_looked_up(parent), *_CALLING)}


def has_other(module: Module, attributes: Mapping[str, Any]) -> bool:
    """Whether a module has other methods, or its class has other attributes by now."""
    kind = class_of(module)
    is_patched = any(_attribute(kind, name) is not known for name, known in attributes.items())
    return is_patched or any(hasattr(attributes.get(n), "__get__") for n in module.__dict__)


class Watched:
    """A module class and what it has under some names, so that later changes are noticed."""

    def __init__(self, kind: type[Module], names: Iterable[str]) -> None:
        """Note what the class has.

        Args:
            kind: The class.
            names: Attributes, which it may lack.
        """
        self._kind, self._names, self._tables = kind, [*names], _tables_behind(kind)
        self._own = self._attributes()
        found = [name for name, value in self._own.items() if value is not None]
        # The name that is given twice makes it return a tuple, even for no other name.
        self._look = attrgetter(*found, *["__mro__"] * 2)
        self._seen = self._look(kind), [*map(len, self._tables)]

    def _attributes(self) -> dict[str, Any]:
        return {name: _attribute(self._kind, name) for name in self._names}

    def is_changed(self) -> bool:
        """Whether the class has something else by now."""
        try:
            if (self._look(self._kind), [*map(len, self._tables)]) == self._seen:
                return False
        except Exception:  # an attribute is gone, or cannot be compared
            return True
        now = self._attributes()  # another attribute may have come, or gone
        return any(now[name] is not known for name, known in self._own.items())


def _tables_behind(kind: type) -> list[Mapping[str, Any]]:
    """The attributes of a module class and its parents below ``Module``; they follow changes."""
    return [vars(cls) for cls in kind.__mro__ if cls not in (Module, object)]


def _attribute(kind: type, name: str) -> Any:
    """What a class below ``Module`` has under a name, before descriptors make something of it."""
    return next((table[name] for table in _tables_behind(kind) if name in table), None)


def _looked_up(parent: type) -> frozenset[str]:
    """Every name that occurs in the code of ``forward`` and of the methods that it calls."""
    names: set[str] = set()
    todo = ["forward"]
    while todo:
        for name in _names_in(_method(parent, todo.pop())):
            if name not in names:
                names.add(name)
                todo.append(name)
    return frozenset(names)


def _method(parent: type, name: str) -> Any:
    """The function of a name that the class or a parent below ``Module`` defines."""
    for cls in parent.__mro__:
        if cls is Module:
            return None
        value = vars(cls).get(name)
        if value is not None:
            value = getattr(value, "__func__", getattr(value, "fget", value))
            return inspect.unwrap(value) if isinstance(value, FunctionType) else None
    return None


def _names_in(function: Any) -> Iterator[str]:
    todo = [function.__code__] if isinstance(function, FunctionType) else []
    while todo:
        code = todo.pop()
        yield from code.co_names
        todo += [const for const in code.co_consts if inspect.iscode(const)]
