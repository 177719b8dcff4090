"""Decides whether a subclass computes what its parent does, so that it can use the parent's rule.

Without this, a subclass with another ``forward`` would silently be differentiated like its parent.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from types import FunctionType, ModuleType
from typing import Any

from torch.nn import Module

from backpack_core.plugins.registry import Sameness
from backpack_core.remember import remembered

# An attribute of a module class, or where code finds a function: ``(torch, "relu")``.
Name = str | tuple[ModuleType, str]
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
def attributes_behind(parent: type) -> Mapping[Name, Any]:
    """What determines what a module class computes, by name, as it is when first seen.

    These are attributes of the class, and the functions that its code finds elsewhere, such as
    ``F.linear``. ``None`` stands for names that the class lacks. It may get a property of this name
    later.
    """
    names = ("forward", *_looked_up(parent), *_CALLING)
    elsewhere = {place for n in names for place in _places(_method(parent, n))}
    return {n: _attribute(parent, n) for n in (*names, *elsewhere)}


def is_patched(kind: type, attributes: Mapping[Name, Any]) -> bool:
    """Whether a module class computes by something else by now."""
    return any(_attribute(kind, name) is not known for name, known in attributes.items())


class Watched:
    """A module class and what it has under some names, so that later changes are noticed."""

    def __init__(self, kind: type[Module], names: Iterable[Name]) -> None:
        """Note what the class has.

        Args:
            kind: The class.
            names: Attributes, which it may lack, and where its code finds functions.
        """
        self._kind, self._tables = kind, _tables_behind(kind)
        self._own = {name: _attribute(kind, name) for name in names}
        found: dict[Any, list[str]] = {kind: []}
        for name in (name for name, value in self._own.items() if value is not None):
            owner, attribute = (kind, name) if isinstance(name, str) else name
            found.setdefault(owner, []).append(attribute)
        own = found.pop(kind)
        for name in [name for name in own if not _has_value(kind, name)]:
            # A descriptor that has a value on instances only is compared itself.
            own.remove(name)
            holder = next(cls for cls in kind.__mro__ if name in vars(cls))
            found.setdefault(holder, []).append(name)
        # The name that is given twice makes it return a tuple, even for no other name.
        self._look = attrgetter(*own, *["__mro__"] * 2)
        self._elsewhere = [(itemgetter(*n, n[0]), vars(owner)) for owner, n in found.items()]
        self._seen = self._now()

    def _now(self) -> Any:
        functions = [look(table) for look, table in self._elsewhere]
        return self._look(self._kind), [*map(len, self._tables)], functions

    def is_changed(self) -> bool:
        """Whether the class has something else by now, or its code finds another function."""
        try:
            now = self._now()
            if now == self._seen:
                return False
        except Exception:  # an attribute is gone, or cannot be compared
            return True
        # Another attribute may have come, or gone.
        if any(_attribute(self._kind, name) is not own for name, own in self._own.items()):
            return True
        self._seen = now
        return False


def _has_value(kind: type, name: str) -> bool:
    """Whether an attribute of a class can be looked up there; descriptors may run users' code."""
    try:
        getattr(kind, name)
    except Exception:
        return False
    return True


def _tables_behind(kind: type) -> list[Mapping[str, Any]]:
    """The attributes of a module class and its parents below ``Module``; they follow changes."""
    return [vars(cls) for cls in kind.__mro__ if cls not in (Module, object)]


def _attribute(kind: type, name: Name) -> Any:
    """What a class below ``Module`` has under a name, before descriptors make something of it."""
    if isinstance(name, tuple):
        return vars(name[0]).get(name[1])
    return next((table[name] for table in _tables_behind(kind) if name in table), None)


def _places(function: Any, is_method: bool = True) -> Iterator[Name]:
    """Where a method finds functions and modules, and where these functions find others.

    So ``F.relu`` leads to ``torch.relu``, but not to what torch does first in every function.
    """
    names, spaces = {*_names_in(function)}, [sys.modules.get(getattr(function, "__module__", ""))]
    for space in filter(None, spaces):  # which grow
        for name in names & vars(space).keys():
            value = vars(space)[name]
            spaces += [value] * (isinstance(value, ModuleType) and value not in spaces)
            if is_method and getattr(value, "__module__", "") == space.__name__:
                yield from _places(value, False)
            if hasattr(value, "__name__"):
                yield space, name


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
    """The function of a name that the class or a parent other than ``Module`` defines."""
    value = _attribute(parent, name)
    value = getattr(value, "__func__", getattr(value, "fget", value))
    return inspect.unwrap(value) if isinstance(value, FunctionType) else None


def _names_in(function: Any) -> Iterator[str]:
    todo = [function.__code__] if isinstance(function, FunctionType) else []
    while todo:
        code = todo.pop()
        yield from code.co_names
        todo += [const for const in code.co_consts if inspect.iscode(const)]


class Lent(Sameness):
    """Subclasses that compute what their parents do use the rules of these."""

    def lenders(self, kind: type[Module]) -> Iterable[type]:
        """The class, and each parent that computes the same."""
        return same_maps(kind)

    def behind(self, kind: type) -> Mapping[Name, Any]:
        """The methods, and the functions that their code finds elsewhere."""
        return attributes_behind(kind)

    def is_patched(self, kind: type, behind: Mapping[Name, Any]) -> bool:
        """Whether any of them was replaced."""
        return is_patched(kind, behind)

    def watch(self, kind: type[Module], behind: Mapping[Name, Any]) -> Callable[[], bool]:
        """A quick comparison with what a class has now."""
        return Watched(kind, behind).is_changed
