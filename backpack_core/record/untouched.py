"""Checks that a plugin's code leaves alone what it is given, and gives results their own memory.

What a rule or an extension is shown belongs to others, too: the gradient at an output becomes
``.grad``. So tensor versions are compared before and after; they are integers, and comparing them
costs nothing beside the smallest kernel. No two results share memory, nor does a result share it
with what the pass was shown.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import memory_of
from backpack_core.errors import PluginCodeError
from backpack_core.record.call import NOTHING
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
    # Not split into functions: this runs several times for each call of a module.
    noted, made = [*(view.counted or _counted(view))], []
    for value in given:
        if isinstance(value, Tensor):
            noted.append((value, value._version))
        elif type(value) not in _PLAIN:
            noted += _held(value)
            made.append(getattr(value, "made", ()))
    result = getattr(plugin, method)(*given)
    for results in made:
        noted += results
    for tensor, version in noted:
        if tensor._version != version:
            raise PluginCodeError(
                f"{type(plugin).__name__}.{method} changed {_name(tensor, view)} in place. What a "
                "plugin is given belongs to all that read it, and to autograd: return a new tensor "
                "(2 * mat in the place of mat.mul_(2))."
            )
    return result


def _shown(view: View) -> list[Tensor]:
    """Every tensor that a rule can get from a view, with all samples."""
    stored, gradient = view.stored, view.full.grad_output
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


def _held(value: object) -> Versions:
    """The tensors among an object's attributes, and in dicts among these, with their versions."""
    found: Versions = []
    its = getattr(value, "__dict__", NOTHING).values()
    for item in [item for item in its if type(item) not in _PLAIN]:
        for part in item.values() if type(item) is dict else (item,):  # results, and what is kept
            if type(part) not in _PLAIN and isinstance(part, Tensor):
                found.append((part, part._version))
    return found


def _name(tensor: Tensor, view: View) -> str:
    stored, gradient = view.stored, view.full.grad_output
    shape, path = list(tensor.shape), view.path
    if any(tensor is other for other in stored.inputs):
        return f"an input of {path}, of shape {shape},"
    if any(tensor is other for other in stored.outputs):
        return f"an output of {path}, of shape {shape},"
    for name, (other, _) in stored.owned.items():
        if tensor is other:
            return f"{name!r} of {path}"
    if tensor is gradient:
        return f"the gradient at the output of {path}, of shape {shape},"
    return f"a tensor of shape {shape} that it was given at {path}"


_TAKEN = "memory of results"


def owned(value: Any, view: View) -> Any:
    """A value in memory of its own.

    Args:
        value: What an extension returned: a tensor, a list of tensors, or an object that sees to
            its memory itself.
        view: The visit; it knows the memory of what rules were shown, and of earlier results.
    """
    if isinstance(value, Tensor):
        return _owned(value, view)
    if isinstance(value, list):
        for position, item in enumerate(value):
            if isinstance(item, Tensor):
                value[position] = _owned(item, view)
    return value


def _owned(tensor: Tensor, view: View) -> Tensor:
    taken = view.memories
    if taken is None or view.stored.saved:  # else more tensors were unpacked since
        # It has the memory of results of earlier columns, too.
        taken = view.memories = view.kept.setdefault(_TAKEN, set())
        taken.update(map(memory_of, _shown(view)))
    memory = memory_of(tensor)
    if memory in taken:
        tensor = tensor.clone()
        memory = memory_of(tensor)
    taken.add(memory)
    return tensor
