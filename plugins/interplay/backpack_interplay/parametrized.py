"""Parameters that a module computes: by parametrizations, or in forward pre-hooks.

The tensor that a parametrization returned is known only while the module runs, so hooks on
parametrizations note it. They are globals of this file, so that modules can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import parametrize

from backpack_core import _hooks, _torch
from backpack_core._torch import parametrizations_of
from backpack_core.errors import UnsupportedError
from backpack_core.record.execution import Execution


class _Computing(local):
    """The executions for which parametrizations compute, in this thread.

    By parametrization: the execution, the name of the parameter, and the same entry of the
    execution around it, if a module calls itself.
    """

    def __init__(self) -> None:
        self.entries: WeakKeyDictionary[Module, tuple[Execution, str, Any]] = WeakKeyDictionary()


_computing = _Computing()


def extend(module: Module) -> None:
    """Put hooks on the parametrizations of a module that have none."""
    for parametrization in parametrizations_of(module).values():
        if not _hooks.are_installed(parametrization):
            _hooks.install(parametrization, before_parametrization, after_parametrization)


def begin(module: Module, execution: Execution) -> None:
    """Have the module's parametrizations compute for an execution that begins."""
    extend(module)  # some may have been registered after ``extend(model)``
    entries = _computing.entries
    for name, parametrization in parametrizations_of(module).items():
        hooks: Any = parametrization._forward_hooks
        hooks.move_to_end(_hooks.KEY)  # hooks of the user's may return another tensor
        outer = entries.get(parametrization) if _torch.running_calls(module) > 1 else None
        entries[parametrization] = execution, name, outer


def end(module: Module, execution: Execution) -> None:
    """End an execution; the execution around it goes on."""
    for parametrization in parametrizations_of(module).values():
        begun, _, outer = _computing.entries.pop(parametrization, (execution, "", None))
        execution.computed = begun.computed
        if outer is not None:
            _computing.entries[parametrization] = outer


def before_parametrization(module: Module, args: Any, kwargs: Any) -> None:
    """The forward pre-hook of a parametrization, which does nothing."""


def after_parametrization(module: Module, args: Any, kwargs: Any, result: Any) -> None:
    """The forward hook of a parametrization, which notes the computed tensor.

    Raises:
        UnsupportedError: It computed another tensor before, in the same forward pass.
    """
    execution, name, _ = _computing.entries.get(module, (None, "", None))
    if execution is None or not isinstance(result, Tensor):
        return
    if execution.computed is None:
        execution.computed = {}
    first = execution.computed.setdefault(name, result)
    if first is not result and not torch.equal(first, result):
        raise UnsupportedError(
            f"The parametrization of {name!r} gave two values in one forward pass (it draws random "
            "numbers, or keeps a state), so what the module computed is unknown. Use "
            "torch.nn.utils.parametrize.cached()."
        )


def computed(module: Module, names: Iterable[str], execution: Execution) -> dict[str, Tensor]:
    """The parameters that a module computed for an execution, by name.

    Args:
        module: The module.
        names: Parameters that a forward pre-hook may have replaced by plain attributes.
        execution: The execution.
    """
    attributes = module.__dict__
    plain = {name: attributes[name] for name in names if name in attributes}
    tensors = {n: t for n, t in plain.items() if isinstance(t, Tensor) and t.grad_fn is not None}
    for name in parametrizations_of(module):
        tensor = (execution.computed or {}).get(name, _cached(module, name))
        if tensor is not None:
            tensors[name] = tensor
    return tensors


def _cached(module: Module, name: str) -> Tensor | None:
    """The tensor that ``torch.nn.utils.parametrize.cached()`` holds, if any."""
    if not getattr(parametrize, "_cache_enabled", 0):
        return None
    tensor: Tensor = getattr(module, name)
    return tensor
