"""Checks that a plugin's code leaves alone what it is given, and gives results their own memory.

What a rule or an extension is shown belongs to others, too: the gradient at an output becomes
``.grad``. So tensor versions are compared before and after; they are integers, and comparing them
costs nothing beside the smallest kernel. No two results share memory, nor does a result share it
with what the pass was shown.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import memories_of, memory_of
from backpack_core.errors import PluginCodeError
from backpack_core.record.call import NOTHING
from backpack_core.record.structure import map_tensors
from backpack_core.record.view import View

# Types that hold no tensors, or are looked at elsewhere; cheaper to test than ``isinstance``.
_PLAIN = frozenset([int, str, bool, type(None), type, ABCMeta, frozenset, list, torch.Size, View])

Versions = list[tuple[Tensor, int]]


def ask(view: View, plugin: object, method: str, *given: Any) -> Any:
    """Call a method of a plugin, and raise if it changed a tensor that it was given.

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
    if not view.is_checked:
        return getattr(plugin, method)(*given)
    seen = noted(view, given)
    result = getattr(plugin, method)(*given)
    see_unchanged(view, seen, plugin, method)
    return result


def noted(view: View, given: Iterable[Any]) -> Versions:
    """The tensors that a plugin may come by at a view, and by what it is given: with versions.

    None in a pass of a known plan: a plugin does the same in all of them.
    """
    if not view.is_checked:
        return []
    found = [*(view.counted or _counted(view))]
    for value in given:
        kind = type(value)
        if Tensor in kind.__mro__:
            found += ((value, value._version),)
        elif kind not in _PLAIN:
            found += held(value)
    return found


def held(value: object) -> Versions:
    """The tensors among an object's attributes, and in dicts among these, with their versions."""
    found: Versions = []
    for item in getattr(value, "__dict__", NOTHING).values():
        kind = type(item)
        if kind in _PLAIN or (kind is dict and not item):
            continue
        for part in item.values() if kind is dict else (item,):  # results, and what is kept
            if Tensor in type(part).__mro__:
                found += ((part, part._version),)
    return found


def see_unchanged(view: View, seen: Versions, plugin: object, method: str) -> None:
    """Raise if a tensor has another version than before a plugin was asked.

    Raises:
        PluginCodeError: One has.
    """
    for tensor, version in seen:
        if tensor._version != version:
            raise PluginCodeError(
                f"{type(plugin).__name__}.{method} changed {_name(tensor, view)} in place. What a "
                "plugin is given belongs to all that read it, and to autograd: return a new tensor "
                "(2 * mat in the place of mat.mul_(2))."
            )


def _shown(view: View) -> list[Tensor]:
    """Every tensor that a rule can get from a view, with all samples."""
    stored, gradient = view.stored, (view._whole or view).grad_output
    taken = () if view.taken is None else view.taken.found.values()
    tensors = [*stored.inputs, *stored.outputs, *[t for t, _ in stored.owned.values()], *taken]
    return tensors if gradient is None else [*tensors, gradient]


def _counted(view: View) -> Versions:
    """The tensors that a view shows, with their versions; those without a version are left out."""
    tensors = _shown(view)
    try:
        versions = [(tensor, tensor._version) for tensor in tensors]
    except RuntimeError:
        versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    if view.taken is None:  # else more tensors are unpacked during the visit
        view.counted = versions
    return versions


def _name(tensor: Tensor, view: View) -> str:
    """What a tensor is, for messages."""
    stored, shape = view.stored, f"of shape {list(tensor.shape)}"
    gradient = () if view.full.grad_output is None else (view.full.grad_output,)
    at_output = ("the gradient at the output", gradient)
    for what, some in (("an input", stored.inputs), ("an output", stored.outputs), at_output):
        if any(tensor is other for other in some):
            return f"{what} of {view.path}, {shape},"
    for name, (other, _) in stored.owned.items():
        if tensor is other:
            return f"{name!r} of {view.path}"
    return f"a tensor {shape} that it was given at {view.path}"


_TAKEN = "memory of results"


def owned(value: Any, view: View) -> Any:
    """A value in memory of its own.

    Args:
        value: What an extension returned: a tensor, a list, tuple or dict of tensors, or an object
            that sees to its memory itself.
        view: The visit.
    """
    if not isinstance(value, Tensor):
        if isinstance(value, list):
            value[:] = [owned(item, view) for item in value]
        is_plain = isinstance(value, (tuple, dict))
        return map_tensors(value, lambda tensor: owned(tensor, view)) if is_plain else value
    taken, memory = memories(view), memory_of(value)
    if memory in taken:
        value = value.clone()
        memory = memory_of(value)
    taken.add(memory)
    return value


def memories(view: View) -> set[int]:
    """The memory of what rules were shown at a visit, and of earlier results."""
    taken = view.memories
    if taken is None or view.taken is not None:  # else more tensors were unpacked since
        # It has the memory of results of earlier columns, too.
        taken = view.memories = view.kept.setdefault(_TAKEN, set())
        taken |= memories_of(_shown(view))
    return taken
