"""Parameters that a module computes: by parametrizations, or in a hook before the forward.

Which tensor a parametrization gave is known only while the module runs. Its hooks are globals of
this file, so that extended modules can be copied and pickled.
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
    """Of this thread: for which execution what computes a parameter does, and under which name.

    Behind them stands the same of the execution around it, where a module calls itself.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[Module, tuple[Execution, str, Any]] = WeakKeyDictionary()


_computing = _Computing()


def extend(module: Module) -> None:
    """Put hooks on what computes parameters of a module, where there are none."""
    for computing in parametrizations_of(module).values():
        if not _hooks.are_installed(computing):
            _hooks.install(computing, before_parametrization, after_parametrization)


def begin(module: Module, execution: Execution) -> None:
    """What computes the module's parameters does so for this execution from now on."""
    extend(module)  # some may be younger than ``extend(model)``
    known = _computing.known
    for name, computing in parametrizations_of(module).items():
        outer = known.get(computing) if _torch.running_calls(module) > 1 else None
        known[computing] = execution, name, outer


def end(module: Module, execution: Execution) -> None:
    """The execution has ended; the one around it goes on."""
    for computing in parametrizations_of(module).values():
        begun, _, outer = _computing.known.pop(computing, (execution, "", None))
        execution.computed = begun.computed
        if outer is not None:
            _computing.known[computing] = outer


def before_parametrization(module: Module, args: Any, kwargs: Any) -> None:
    """The forward pre-hook of what computes a parameter: nothing."""


def after_parametrization(module: Module, args: Any, kwargs: Any, result: Any) -> None:
    """The forward hook of what computes a parameter: notes which tensor the module got.

    Raises:
        UnsupportedError: It computed another one before, in the same forward pass.
    """
    execution, name, _ = _computing.known.get(module, (None, "", None))
    if execution is None or not isinstance(result, Tensor):
        return
    if execution.computed is None:
        execution.computed = {}
    known = execution.computed.setdefault(name, result)
    if known is not result and not torch.equal(known, result):
        raise UnsupportedError(
            f"The parametrization of {name!r} gave two values in one forward pass (it draws random "
            "numbers, or keeps a state), so what the module computed is unknown. Use "
            "torch.nn.utils.parametrize.cached()."
        )


def computed(module: Module, names: Iterable[str], execution: Execution) -> dict[str, Tensor]:
    """The parameters that a module computed for an execution, by name.

    Args:
        module: The module.
        names: Parameters that a hook before the forward may have left as plain attributes.
        execution: The execution.
    """
    attributes = module.__dict__
    plain = {name: attributes[name] for name in names if name in attributes}
    found = {n: t for n, t in plain.items() if isinstance(t, Tensor) and t.grad_fn is not None}
    for name in parametrizations_of(module):
        tensor = (execution.computed or {}).get(name, _cached(module, name))
        if tensor is not None:
            found[name] = tensor
    return found


def _cached(module: Module, name: str) -> Tensor | None:
    """The tensor that ``torch.nn.utils.parametrize.cached()`` holds, if any."""
    if not getattr(parametrize, "_cache_enabled", 0):
        return None
    found: Tensor = getattr(module, name)
    return found
