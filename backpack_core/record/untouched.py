"""Whether code of a plugin leaves alone what it is given: versions of tensors, before and after.

What a rule or an extension sees belongs to everybody: the gradient at an output becomes ``.grad``.
Versions are integers, so comparing them costs nothing beside the smallest kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack_core.errors import PluginCodeError
from backpack_core.record.view import View


class Untouched:
    """The tensors of a call, and others, before code of a plugin runs."""

    __slots__ = ("_before", "_given", "_view")

    def __init__(self, view: View, *given: Any) -> None:
        """Note the versions.

        Args:
            view: What the plugin sees.
            given: What else it is given: tensors, or what holds some as its attributes.
        """
        self._view = view = view.full
        if view.watched is None:  # once for a visit: it ends where something was changed
            view.watched = _shown(view)
        self._given = [tensor for value in given for tensor in _held(value)]
        self._before = [tensor._version for tensor in self._given]

    def check(self, plugin: object, method: str) -> None:
        """Compare them.

        Args:
            plugin: Whose code ran.
            method: Which.

        Raises:
            PluginCodeError: A tensor was changed in place.
        """
        watched = self._view.watched
        assert watched is not None
        if [tensor._version for tensor in watched[0]] == watched[1] and (
            [tensor._version for tensor in self._given] == self._before
        ):
            return
        tensors, before = [*watched[0], *self._given], [*watched[1], *self._before]
        pairs = zip(tensors, before, strict=True)
        changed = next(tensor for tensor, version in pairs if tensor._version != version)
        raise PluginCodeError(
            f"{type(plugin).__name__}.{method} changed {self._name(changed)} in place. What a "
            "plugin is given belongs to all that read it, and to autograd: return a new tensor "
            "(2 * mat in the place of mat.mul_(2))."
        )

    def _name(self, tensor: Tensor) -> str:
        view = self._view
        stored, gradient = view.stored, view.grad_output
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


def _shown(view: View) -> tuple[list[Tensor], list[int]]:
    """The tensors of a call that have a version, and these."""
    stored, gradient = view.stored, view.grad_output
    owned = [tensor for tensor, _ in stored.owned.values()]
    found = [*stored.inputs, *stored.outputs, *owned, *(() if gradient is None else [gradient])]
    found = [tensor for tensor in found if not tensor.is_inference()]
    return found, [tensor._version for tensor in found]


_WITHOUT = frozenset((int, str, bool, type(None), tuple, frozenset, torch.Size, type))


def _held(value: Any) -> list[Tensor]:
    """The tensors that a value is, or holds as attributes, or in tables that are."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for item in vars(value).values() if hasattr(value, "__dict__") else ():
        if type(item) in _WITHOUT:
            continue
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):  # results, and what is kept
            found += [part for part in item.values() if isinstance(part, Tensor)]
    return found
