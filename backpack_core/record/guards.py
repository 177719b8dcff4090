"""Calls the code of plugins, and makes sure that results have their own memory.

Tensors that a rule or an extension gets may be used elsewhere: the gradient of an output becomes
``.grad``. A library may guard against changes to them. Every result has its own memory: it shares
none with other results, or with tensors that rules got.
"""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import memories_of, memory_of
from backpack_core.record.call import NOTHING
from backpack_core.record.nested import map_tensors
from backpack_core.record.view import View

# Types of attributes that hold no tensors, or whose tensors are found elsewhere. A set of exact
# types is faster than ``isinstance``.
PLAIN = {int, str, bool, type(None), type, ABCMeta, frozenset, list, torch.Size, View}

Versions = list[tuple[Tensor, int]]


class Guard(ABC):
    """Checks that a plugin's code does not change the tensors that it gets."""

    @abstractmethod
    def before(self, view: View, arguments: Iterable[Any]) -> Versions:
        """The tensors that a plugin's method can reach, with their version counters.

        Args:
            view: The view that it gets.
            arguments: Its other arguments: tensors, or objects that have some as attributes.
        """

    @abstractmethod
    def after(self, view: View, seen: Versions, plugin: object, method: str) -> None:
        """Raise if the version of a tensor differs from that before the method was called.

        Raises:
            PluginCodeError: A tensor was changed in place.
        """


# A library appends its guard; without one, changes are not noticed.
GUARDS: list[Guard] = []


def guard_of(view: View) -> Guard | None:
    """The guard of a visit; ``None`` in a pass with a known plan: plugins were checked before."""
    return GUARDS[-1] if view.is_checked and GUARDS else None


def ask(view: View, plugin: object, method: str, *arguments: Any) -> Any:
    """Call a method of a plugin, under the guard of the visit if there is one.

    Args:
        view: The view that it gets.
        plugin: The rule, extension or propagator.
        method: The name of its method.
        arguments: The other arguments: tensors, or objects that have some as attributes.

    Returns:
        The method's result.

    Raises:
        PluginCodeError: A tensor was changed in place.
    """
    guard = guard_of(view)
    if guard is None:
        return getattr(plugin, method)(*arguments)
    seen = guard.before(view, arguments)
    result = getattr(plugin, method)(*arguments)
    guard.after(view, seen, plugin, method)
    return result


def versions_in(value: object) -> Versions:
    """The tensors among an object's attributes, and in dicts among these, with their versions."""
    versions: Versions = []
    for item in getattr(value, "__dict__", NOTHING).values():
        kind = type(item)
        if kind in PLAIN or (kind is dict and not item):
            continue
        for part in item.values() if kind is dict else (item,):  # dicts are results and caches
            if Tensor in type(part).__mro__:
                versions += ((part, part._version),)
    return versions


def visible_tensors(view: View) -> list[Tensor]:
    """Every tensor that a rule can get from a view, with all samples."""
    stored, gradient = view.stored, (view._whole or view).grad_output
    unpacked = () if view.unpacked is None else view.unpacked.tensors.values()
    tensors = [*stored.inputs, *stored.outputs, *[t for t, _ in stored.owned.values()], *unpacked]
    return tensors if gradient is None else [*tensors, gradient]


def unshared(value: Any, view: View, results: set[int]) -> Any:
    """The value with memory of its own: tensors that share memory are cloned.

    Args:
        value: What an extension returned: a tensor; a list, tuple or dict of tensors; or an object
            that manages its own memory.
        view: The visit.
        results: The memory of results of all visits, since two calls may receive one tensor. The
            memory of this value is added.
    """
    if not isinstance(value, Tensor):
        if isinstance(value, list):
            value[:] = [unshared(item, view, results) for item in value]
        is_plain = isinstance(value, (tuple, dict))
        return map_tensors(value, lambda t: unshared(t, view, results)) if is_plain else value
    memory = memory_of(value)
    if memory in results or memory in visible_memory(view):
        value = value.clone()
        memory = memory_of(value)
    results.add(memory)
    return value


def visible_memory(view: View) -> set[int]:
    """The memory of the tensors that rules can get at a visit."""
    memories = view.memories
    if memories is None or view.unpacked is not None:  # more tensors may have been unpacked since
        memories = view.memories = (memories or set()) | memories_of(visible_tensors(view))
    return memories
