"""Sees that a plugin's code changes none of its arguments.

What a rule or an extension is shown belongs to others, too: the gradient at an output becomes
``.grad``. So tensor versions are compared before and after; they are integers, and comparing them
costs nothing beside the smallest kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from backpack_core.errors import PluginCodeError
from backpack_core.record.guards import PLAIN, Guard, Versions, versions_in, visible_tensors
from backpack_core.record.view import View


class ByVersions(Guard):
    """Compares versions."""

    def before(self, view: View, arguments: Iterable[Any]) -> Versions:
        """Those that the view shows, and those among the arguments."""
        found = [*(view.counted or _counted(view))]
        for value in arguments:
            kind = type(value)
            if Tensor in kind.__mro__:
                found += ((value, value._version),)
            elif kind not in PLAIN:
                found += versions_in(value)
        return found

    def after(self, view: View, seen: Versions, plugin: object, method: str) -> None:
        """Name the plugin, the method and the tensor."""
        for tensor, version in seen:
            if tensor._version != version:
                raise PluginCodeError(
                    f"{type(plugin).__name__}.{method} changed {_name(tensor, view)} in place. "
                    "What a plugin is given belongs to all that read it, and to autograd: return a "
                    "new tensor (2 * mat instead of mat.mul_(2))."
                )


def _counted(view: View) -> Versions:
    """The tensors that a view shows, with their versions; those without a version are left out."""
    tensors = visible_tensors(view)
    try:
        versions = [(tensor, tensor._version) for tensor in tensors]
    except RuntimeError:
        versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    if view.unpacked is None:  # else more tensors are unpacked during the visit
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
