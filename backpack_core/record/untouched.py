"""Whether code of a plugin leaves alone what it is given: versions of tensors, before and after.

What a rule or an extension sees belongs to everybody: the gradient at an output becomes ``.grad``.
Versions are integers, so comparing them costs nothing beside the smallest kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backpack_core.errors import PluginCodeError
from backpack_core.record.view import View


class Untouched:
    """The tensors of a call, and others, before code of a plugin runs."""

    __slots__ = ("_before", "_shown", "_view")

    def __init__(self, view: View, *given: Any) -> None:
        """Note the versions.

        Args:
            view: What the plugin sees.
            given: What else it is given: tensors, or what holds some as its attributes.
        """
        self._view = view
        self._shown = shown = [*_shown(view.full)]
        for value in given:
            if isinstance(value, Tensor):
                shown.append(value)
            elif hasattr(value, "__dict__"):
                for item in vars(value).values():
                    if isinstance(item, Tensor):
                        shown.append(item)
                    elif isinstance(item, dict):  # results, and what is kept
                        shown += [part for part in item.values() if isinstance(part, Tensor)]
        self._before = [tensor._version for tensor in shown]

    def check(self, plugin: object, method: str) -> None:
        """Compare them.

        Args:
            plugin: Whose code ran.
            method: Which.

        Raises:
            PluginCodeError: A tensor was changed in place.
        """
        after = [tensor._version for tensor in self._shown]
        if after == self._before:
            return
        pairs = zip(self._shown, after, self._before, strict=True)
        changed = next(tensor for tensor, one, other in pairs if one != other)
        raise PluginCodeError(
            f"{type(plugin).__name__}.{method} changed {self._name(changed)} in place. What a "
            "plugin is given belongs to all that read it, and to autograd: return a new tensor "
            "(2 * mat in the place of mat.mul_(2))."
        )

    def _name(self, tensor: Tensor) -> str:
        view = self._view
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


def _shown(view: View) -> list[Tensor]:
    """The tensors of a call that have a version; found once for a visit."""
    if not view.watched:
        stored, gradient = view.stored, view.grad_output
        owned = [tensor for tensor, _ in stored.owned.values()]
        found = (*stored.inputs, *stored.outputs, *owned, *(() if gradient is None else [gradient]))
        view.watched = [tensor for tensor in found if not tensor.is_inference()]
    return view.watched
