"""Compares, before each replay, everything that a recorded graph takes for granted.

This must be quick, so it is one generated function. Numbers and containers are compared by value,
other objects by identity. These objects are held, so that no other object can get the ``id`` of one
that was deleted.
"""

from __future__ import annotations

import functools
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_capture import _torch
from backpack_capture.nested import LONGEST, is_plain, is_short_array
from backpack_capture.watch import (
    DEEPEST,
    HOOKS,
    OF_ALL,
    Watch,
    attributes_of,
    globals_of,
    is_compiler,
)
from backpack_core.plugins.registry import registry
from backpack_core.record.switch import is_disabled
from backpack_products.sameness import Watched, attributes_behind
from backpack_products.tuning import memory_budget
from backpack_products.values import look_of

# Python adds some of these when a class is first asked for annotations, or an object is copied.
_LATER = {"__annotations__", "__annotations_cache__", "__annotate_func__", "__slotnames__"}
_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "_abc_impl", *_LATER}


class Guard:
    """The state of everything that a watch looks at.

    Attributes:
        holds: Whether it is still the same.
    """

    def __init__(self, watch: Watch) -> None:
        self._known: dict[str, Any] = {"form": _form, "same": _same}
        self._names: dict[int, str] = {}
        self._lines: list[str] = []
        self._note_world()
        for kind in dict.fromkeys(map(type, watch.modules)):
            self._note_kind(kind)
        for module in watch.modules:
            self._note_module(module)
        self._note_tensors([*watch.tensors.values(), *watch.outside.values()])
        for tensor in watch.tensors.values():
            if tensor.is_leaf:
                self._note_hooks(tensor)
        for extension in watch.extensions:
            self._note_attributes(extension)
        # Functions read only the attributes that they name: a trainer may count its steps.
        self._known["names"] = watch.names
        for kind in watch.classes:
            self._note_class(kind)
        for function in watch.functions:
            self._note_function(function)
        if watch.bound is not None:
            self._known["bound"] = watch.bound
            self._require(self._value("bound", watch.bound, is_named=True))
        text = "\n    ".join(["def holds():", *self._lines, "return True"])
        exec(compile(text, "<guard of a captured step>", "exec"), self._known)
        self._holds: Callable[[], bool] = self._known["holds"]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        try:
            return self._holds()
        except Exception:  # something is missing, or of another kind: the engine will say what
            return False

    # What is compared ----------------------------------------------------------------------------

    def _note_world(self) -> None:
        known: dict[str, Any] = {
            "modes": _torch.modes,
            "registry": registry,
            "memory_budget": memory_budget,
            "is_disabled": is_disabled,
        }
        self._known.update(known)
        self._require(f"modes() == {self._name(_torch.modes())}")
        self._require(f"registry.generation == {registry.generation}")
        self._require(f"memory_budget() == {memory_budget()!r}")
        self._require(f"is_disabled() is {is_disabled()}")

    def _note_kind(self, kind: type[Module]) -> None:
        is_changed = Watched(kind, attributes_behind(kind)).is_changed
        self._require(f"not {self._name(is_changed)}()")

    def _note_module(self, module: Module) -> None:
        kind, table = type(module), vars(module)
        name = self._name(table)
        terms = [f"type({self._name(module)}) is {self._name(kind)}"]
        if not is_compiler(module):
            terms += [f"len({name}) == {len(table)}", f"{name}['training'] is {module.training}"]
            for key, value in table.items():
                if key not in OF_ALL and not key.startswith("_backpack"):
                    terms.append(self._value(f"{name}[{key!r}]", value))
        for key in ("_modules", "_parameters", "_buffers"):
            inner, place = table[key], f"{name}[{key!r}]"
            terms.append(f"len({place}) == {len(inner)}" if inner else f"not {place}")
            terms += [f"{place}[{n!r}] is {self._name(value)}" for n, value in inner.items()]
        for key in HOOKS:
            place = f"{name}[{key!r}]"
            keys = {*table[key]}  # our hooks may change their order at the first call
            terms.append(f"{place}.keys() == {self._name(keys)}" if keys else f"not {place}")
        self._require(*terms)

    def _note_tensors(self, tensors: Sequence[Tensor]) -> None:
        names = ", ".join(map(self._name, tensors))
        self._require(f"{self._name(look_of(tensors))}({names})")

    def _note_hooks(self, parameter: Tensor) -> None:
        name = self._name(parameter)
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            self._require(f"{'' if getattr(parameter, key) else 'not '}{name}.{key}")

    def _note_attributes(self, value: object) -> None:
        table = vars(value)
        name = self._name(table)
        terms = [f"type({self._name(value)}) is {self._name(type(value))}"]
        terms += [f"len({name}) == {len(table)}"]
        terms += [self._value(f"{name}[{key!r}]", item) for key, item in table.items()]
        self._require(*terms)

    def _note_class(self, kind: type) -> None:
        name, own = f"{self._name(kind)}.__dict__", vars(kind).keys()
        count = f"len({name}.keys() - {self._name(_LATER)}) == {len(own - _LATER)}"
        terms = [f"(len({name}) == {len(own)} or {count})"]
        for key, value in vars(kind).items():
            if key not in _OF_CLASSES:
                terms.append(self._value(f"{name}[{key!r}]", value))
        self._require(*terms)

    def _note_function(self, function: Any) -> None:
        name, known = self._name(function), function.__globals__
        terms = [f"{name}.__code__ is {self._name(function.__code__)}"]
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            terms.append(self._value(f"{self._name(cell)}.cell_contents", value, True))
        names = globals_of(function)
        for key in sorted(names & known.keys()):
            terms.append(self._value(f"{self._name(known)}[{key!r}]", known[key], True))
        terms.append(f"{self._name(known)}.keys().isdisjoint({self._name(names - known.keys())})")
        for key in ("__defaults__", "__kwdefaults__"):
            terms.append(self._value(f"{name}.{key}", getattr(function, key)))
        self._require(*terms)

    # Writing -------------------------------------------------------------------------------------

    def _require(self, *terms: str) -> None:
        self._lines += [f"if not ({' and '.join(terms)}):", "    return False"]

    def _name(self, value: Any) -> str:
        """A name by which the function finds a value."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"k{len(self._known)}"
            self._known[name] = value
        return name

    def _value(self, place: str, value: Any, is_named: bool = False) -> str:
        """The condition that a place holds the same value; for objects, perhaps only some names."""
        if is_plain(value):
            name = self._name(value)
            return f"({place} is {name} or same({place}, {name}))"
        names, depth = self._known["names"] if is_named else None, DEEPEST
        found = _form(value, depth, names)
        if isinstance(found, _Same):
            return f"{place} is {self._name(value)}"
        more = f", {depth}, names" if is_named else ""
        return f"form({place}{more}) == {self._name(found)}"


def _same(value: Any, known: Any) -> bool:
    if type(value) is not type(known) or value != known:
        return False
    return bool(value) or repr(value) == repr(known)  # zero may be negative


def _form(value: Any, deepest: int = DEEPEST, names: set[str] | None = None) -> Any:
    """A value in a form that differs for other values: numbers and containers by value.

    Args:
        value: The value.
        deepest: How many levels are looked at.
        names: The attributes of objects that count; ``None`` for all.
    """
    if is_plain(value):
        return type(value), value or repr(value)
    if isinstance(value, (set, frozenset)):
        return type(value), {*value}
    if is_short_array(value):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, (array, bytearray)) and len(value) <= LONGEST:
        return type(value), bytes(value)
    if not deepest:
        return _Same(value)

    def inner(item: Any) -> Any:
        return _form(item, deepest - 1, names)

    table = attributes_of(value)
    if table is None or (names is None and isinstance(value, types.ModuleType)):
        attributes = []
    else:
        shown = table if names is None else [name for name in table if name in names]
        attributes = [(name, inner(table[name])) for name in shown]

    if isinstance(value, (list, tuple, deque)):
        return type(value), [*map(inner, value)], attributes
    if isinstance(value, (dict, types.MappingProxyType)):
        items = [(key, inner(item)) for key, item in value.items()]
        return type(value), items, attributes
    if isinstance(value, weakref.ref):
        return _Same(value), inner(value())
    if isinstance(value, types.MethodType):
        return _Same(value.__func__), inner(value.__self__)
    if isinstance(value, ContextVar):
        return _Same(value), inner(value.get() if value in copy_context() else None)
    if isinstance(value, functools.partial):
        return [*map(inner, (value.func, value.args, value.keywords))]
    return _Same(value) if table is None else (_Same(value), attributes)


class _Same:
    """An object that equals only itself, and is held."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]
