"""Inputs and outputs as attributes of modules, where scripts look for them. Imports backpack_core.

The core stores them with the autograd graph. Here they are also set on the module, from the forward
pass until the backward pass has visited the module. They are detached: a module that held its own
graph would keep that, and itself, alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack.context import CTX, ExtendedHandle
from backpack_core import _hooks
from backpack_core.engine.active import current
from backpack_core.errors import OverwrittenInputError
from backpack_core.record.state import SHOWN_ATTRIBUTE
from backpack_core.record.switch import is_recording
from backpack_core.record.view import View


def hook_store_io(module: Module, input: tuple[Any, ...], output: Any) -> None:
    """Forward hook: set ``module.input0``, ``module.input1``, …, and ``module.output``.

    Args:
        module: The module.
        input: Its positional arguments.
        output: What it returned; of a tuple, the first element.
    """
    if not is_recording():
        return
    first = output[0] if isinstance(output, tuple) else output
    values = {f"input{i}": value for i, value in enumerate(input)} | {"output": first}
    _show(module, {name: _without_graph(value) for name, value in values.items()})


def _show(module: Module, values: dict[str, Any]) -> None:
    """Set these attributes instead of what was shown before."""
    memory_cleanup(module)
    module.__dict__.setdefault(SHOWN_ATTRIBUTE, set()).update(values)
    module.__dict__.update(values)


def _without_graph(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.grad_fn is None:
        return value
    return value.detach().requires_grad_(value.requires_grad)


def memory_cleanup(module: Module) -> None:
    """Remove what :func:`hook_store_io` set.

    Args:
        module: The module.
    """
    attributes = module.__dict__
    for name in attributes.get(SHOWN_ATTRIBUTE, ()):
        attributes.pop(name, None)


class FreeAfterVisit:
    """Tensor hook on an output: the backward pass has been there."""

    def __init__(self, module: Module) -> None:
        self._module = weakref.ref(module)
        self._thread = threading.get_ident()

    def __call__(self, grad: Tensor) -> None:
        """Free the attributes, unless the graph is retained for another backward pass."""
        module, context = self._module(), current(self._thread)
        if module is not None and not (context is not None and context.retain_graph):
            memory_cleanup(module)


def hook_await_visit(module: Module, input: tuple[Any, ...], output: Any) -> None:
    """Forward hook: free what is stored when the backward pass has visited the module."""
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Tensor) and first.grad_fn is not None and is_recording():
        first.register_hook(FreeAfterVisit(module))


def store_io(module: Module) -> None:
    """Set inputs and outputs on every part of a module that was extended, from now on.

    Args:
        module: The module.
    """
    CTX.add_hook_handle(ExtendedHandle(module))
    for part in module.modules():
        part.__dict__["_backpack_extend"] = True
        if _hooks.are_installed(part) and hook_store_io not in part._forward_hooks.values():
            CTX.add_hook_handle(ExtendedHandle(part))
            for hook in (hook_store_io, hook_await_visit):
                CTX.add_hook_handle(part.register_forward_hook(hook))


class HookWithIO:
    """Runs an extension hook with the inputs and output of the visited call set on the module.

    If a module is called several times, the forward pass leaves those of the last call.
    """

    def __init__(self, hook: Callable[[Module], None], visiting: Callable[[], View | None]) -> None:
        self.hook = hook
        self._visiting = visiting

    def __call__(self, module: Module) -> None:
        """Set them, and run the hook."""
        view = self._visiting()
        with nullcontext() if view is None else _io(view):
            self.hook(module)


@contextmanager
def _io(view: View) -> Iterator[None]:
    """Inputs and output of a call on its module; what was overwritten in place is left out."""
    module, values = view.call.module, dict[str, Any]()
    attributes = module.__dict__
    names = attributes.get(SHOWN_ATTRIBUTE, set())
    before = {name: attributes[name] for name in names if name in attributes}
    for position in range(len(view.stored.inputs)):
        with suppress(OverwrittenInputError):
            values[f"input{position}"] = view.tensor_input(position)
    with suppress(OverwrittenInputError):
        values["output"] = view.output
    _show(module, values)
    try:
        yield
    finally:
        _show(module, before)
