"""Checks that a plugin's code does not change the tensors that it is given.

Others use these tensors, too: the gradient at an output becomes ``.grad``. So tensor versions are
compared before and after. They are integers, and comparing them takes less than any kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from backpack_core.contract.propagator import Reading
from backpack_core.errors import PluginCodeError
from backpack_core.record.guards import visible_tensors
from backpack_core.record.view import View
from backpack_products.held import PLAIN, Versions, held_by


@contextmanager
def by_versions(view: View, plugin: object, method: str, *arguments: Any) -> Iterator[None]:
    """Compare the versions of the tensors that a view shows, and of those among the arguments.

    Raises:
        PluginCodeError: A version has changed. It names the plugin, the method and the tensor.
    """
    versions = [*(view.counted or _counted(view))]
    readings = [value for value in arguments if isinstance(value, Reading)]
    for value in arguments:
        kind = type(value)
        if Tensor in kind.__mro__:
            versions += ((value, value._version),)
        elif kind not in PLAIN:
            versions += held_by(value)
    yield
    versions += [entry for reading in readings for entry in reading.made]  # now, or for others
    for tensor, version in versions:
        if tensor._version != version:
            raise PluginCodeError(
                f"{type(plugin).__name__}.{method} changed {_name(tensor, view)} in place. "
                "Others read the tensors that a plugin is given, autograd too: return a new "
                "tensor (2 * mat instead of mat.mul_(2))."
            )


def _counted(view: View) -> Versions:
    """The tensors that a view shows, with versions; inference tensors have none."""
    tensors = visible_tensors(view)
    try:
        versions = [(tensor, tensor._version) for tensor in tensors]
    except RuntimeError:
        versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    if view.unpacked is None:  # otherwise further tensors may be unpacked later in the visit
        view.counted = versions
    return versions


def _name(tensor: Tensor, view: View) -> str:
    """A description of a tensor, for messages."""
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
