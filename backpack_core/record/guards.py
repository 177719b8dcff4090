"""Calls the code of plugins, and makes sure that results have their own memory.

Tensors that a rule or an extension gets may be used elsewhere: the gradient of an output becomes
``.grad``. A library may guard against changes to them. Every result has its own memory: it shares
none with other results, or with tensors that rules got.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

from torch import Tensor

from backpack_core._torch import memories_of, memory_of
from backpack_core.record.view import View

# A library's guard over a call of a plugin's code. It gets the view, the plugin, the name of its
# method and the other arguments; and raises ``PluginCodeError`` if one of their tensors was changed
# in place.
Guard = Callable[..., AbstractContextManager[None]]

# A library appends its guard; without one, changes are not noticed.
GUARDS: list[Guard] = []


def guarded(
    view: View, plugin: object, method: str, *arguments: Any
) -> AbstractContextManager[None]:
    """The guard over a call. None in a pass with a known plan: plugins were checked before.

    Args:
        view: The view that the plugin gets.
        plugin: The rule, extension or propagator.
        method: The name of its method.
        arguments: The other arguments: tensors, or objects that have some as attributes.
    """
    is_guarded = view.is_checked and GUARDS
    return GUARDS[-1](view, plugin, method, *arguments) if is_guarded else nullcontext()


def ask(view: View, plugin: object, method: str, *arguments: Any) -> Any:
    """Call a method of a plugin, under the guard of the visit if there is one.

    Raises:
        PluginCodeError: A tensor was changed in place.
    """
    if not view.is_checked:
        return getattr(plugin, method)(*arguments)
    with guarded(view, plugin, method, *arguments):
        return getattr(plugin, method)(*arguments)


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
        if isinstance(value, (list, dict)):
            value = copy(value)  # another parameter may get the same object
            for key, item in enumerate(value) if isinstance(value, list) else value.items():
                value[key] = unshared(item, view, results)
        elif isinstance(value, tuple):
            items = [unshared(item, view, results) for item in value]
            value = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value
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
