"""Sees ``backward()`` being called inside a block: what it is called on, before autograd begins."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backpack_core.engine.active import Context, current
from backpack_core.engine.hooks import begin
from backpack_core.errors import UsageError

# What hands roots to autograd's engine, and the names of its arguments for roots and gradients.
_ENTRIES: dict[Any, tuple[str, str]] = {
    Tensor.backward: ("self", "gradient"),
    torch.autograd.backward: ("tensors", "grad_tensors"),
    torch.autograd.grad: ("outputs", "grad_outputs"),
}
_NAMES = {function: tuple(inspect.signature(function).parameters) for function in _ENTRIES}


class Announcer(TorchFunctionMode):
    """Tells the engine of every backward pass that is begun by its context's thread.

    Everything else runs as it does without; so does all that runs inside of a backward pass.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at calls of ``backward()``, let others pass."""
        kwargs = kwargs or {}
        if func not in _ENTRIES or current(threading.get_ident()) is not self._context:
            return func(*args, **kwargs)
        given = {**dict(zip(_NAMES[func], args, strict=False)), **kwargs}
        roots, gradients = [_tuple(given.get(name)) for name in _ENTRIES[func]]
        if given.get("is_grads_batched"):
            raise UsageError(
                "torch.autograd.grad(..., is_grads_batched=True) brings several gradients at once, "
                "which extensions do not take: call it once for each, or outside of the block."
            )
        announced = begin(self._context, roots, gradients)
        if announced is None:
            return func(*args, **kwargs)
        changes = {} if func is torch.autograd.grad else announced.narrow(given)
        if any(extension.keeps_graph for extension in self._context.extensions):
            changes["retain_graph"] = True
        if changes:
            args, kwargs = (), {**given, **changes}
        self._context.announced.append(announced)
        try:
            result = func(*args, **kwargs)
        finally:
            self._context.announced.remove(announced)
            announced.leave()
        announced.finish()
        return result


def _tuple(value: Any) -> tuple[Any, ...]:
    """One thing, several, or none, as a tuple."""
    if isinstance(value, Sequence) and not isinstance(value, (Tensor, *_EDGES)):
        return tuple(value)
    return () if value is None else (value,)


# An edge is a named tuple, and as such a sequence.
_EDGES = (torch.autograd.graph.GradientEdge,)
