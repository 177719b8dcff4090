"""Calls a plugin's code, and gives results their own memory.

What a rule or an extension is shown belongs to others, too: the gradient at an output becomes
``.grad``. A library may guard it. No two results share memory, nor does a result share it with what
the pass was shown.
"""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import memories_of, memory_of
from backpack_core.record.call import NOTHING
from backpack_core.record.structure import map_tensors
from backpack_core.record.view import View

# Types that hold no tensors, or are looked at elsewhere; cheaper to test than ``isinstance``.
PLAIN = frozenset([int, str, bool, type(None), type, ABCMeta, frozenset, list, torch.Size, View])

Versions = list[tuple[Tensor, int]]


class Guard(ABC):
    """Sees that a plugin's code does not change what it is given."""

    @abstractmethod
    def before(self, view: View, given: Iterable[Any]) -> Versions:
        """The tensors that a plugin may come by, with their versions.

        Args:
            view: What it sees.
            given: Its arguments: tensors, or objects that hold some as attributes.
        """

    @abstractmethod
    def after(self, view: View, seen: Versions, plugin: object, method: str) -> None:
        """Raise if a tensor has another version than before a plugin was asked.

        Raises:
            PluginCodeError: One has.
        """


# A library adds its own; without one, nobody looks.
GUARDS: list[Guard] = []


def guard_of(view: View) -> Guard | None:
    """Who guards a visit; nobody in a pass of a known plan, where a plugin does the same again."""
    return GUARDS[-1] if view.is_checked and GUARDS else None


def ask(view: View, plugin: object, method: str, *given: Any) -> Any:
    """Call a method of a plugin; who guards the visit sees what it does to what it is given.

    Args:
        view: What it sees.
        plugin: The rule, extension or propagator.
        method: The name of its method.
        given: The arguments: tensors, or objects that hold some as attributes.

    Returns:
        The method's result.

    Raises:
        PluginCodeError: A tensor was changed in place.
    """
    guard = guard_of(view)
    if guard is None:
        return getattr(plugin, method)(*given)
    seen = guard.before(view, given)
    result = getattr(plugin, method)(*given)
    guard.after(view, seen, plugin, method)
    return result


def versions_in(value: object) -> Versions:
    """The tensors among an object's attributes, and in dicts among these, with their versions."""
    found: Versions = []
    for item in getattr(value, "__dict__", NOTHING).values():
        kind = type(item)
        if kind in PLAIN or (kind is dict and not item):
            continue
        for part in item.values() if kind is dict else (item,):  # results, and what is kept
            if Tensor in type(part).__mro__:
                found += ((part, part._version),)
    return found


def visible_tensors(view: View) -> list[Tensor]:
    """Every tensor that a rule can get from a view, with all samples."""
    stored, gradient = view.stored, (view._whole or view).grad_output
    taken = () if view.unpacked is None else view.unpacked.tensors.values()
    tensors = [*stored.inputs, *stored.outputs, *[t for t, _ in stored.owned.values()], *taken]
    return tensors if gradient is None else [*tensors, gradient]


def owned(value: Any, view: View, results: set[int]) -> Any:
    """A value in memory of its own.

    Args:
        value: What an extension returned: a tensor, a list, tuple or dict of tensors, or an object
            that sees to its memory itself.
        view: The visit.
        results: The memory of the results of other visits: what arrives at two calls may be one
            tensor. That of this value is added.
    """
    if not isinstance(value, Tensor):
        if isinstance(value, list):
            value[:] = [owned(item, view, results) for item in value]
        is_plain = isinstance(value, (tuple, dict))
        return map_tensors(value, lambda t: owned(t, view, results)) if is_plain else value
    memory = memory_of(value)
    if memory in results or memory in visible_memory(view):
        value = value.clone()
        memory = memory_of(value)
    results.add(memory)
    return value


def visible_memory(view: View) -> set[int]:
    """The memory of what rules were shown at a visit."""
    taken = view.memories
    if taken is None or view.unpacked is not None:  # else more tensors were unpacked since
        taken = view.memories = (taken or set()) | memories_of(visible_tensors(view))
    return taken
