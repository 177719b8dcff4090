"""Functions that may look at values on the host, although steps are recorded and repeated.

A recorder of torch's operations does not see what Python reads of values. So a recording would hold
one answer for good. A :class:`HostFunction` is a single operation in it, and looks anew each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.record.state import Settings, settings_of
from backpack_products._torch import is_on_host, reads_are_recorded
from backpack_products.rows import is_made, tensors_behind

NAMESPACE: Final = "backpack"
_LOCK = Lock()


class HostFunction:
    """A function of tensors, which reads values on the host.

    It must depend on its arguments only, must not change them, and must return a tensor with memory
    of its own. Arguments are tensors, or inputs that are created from tensors; with any others it
    is not called while a pass is recorded. A recorder with ``runs_host_functions`` sees one
    operation of torch, ``backpack::name``; one with ``reads_are_assumptions`` sees what the
    function does.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._library: torch.library.Library | None = None  # the operation ends with it
        self._forms = list[Any]()  # what recorded calls have besides tensors
        self.__doc__ = function.__doc__

    def takes(self, *values: Any) -> bool:
        """Whether it may be called with these values: they are on the host, without a graph."""
        tensors = [tensor for value in values for tensor in tensors_behind(value)]
        if torch.is_grad_enabled() or not is_on_host(*tensors, allowed="runs_host_functions"):
            return False
        return not self._is_operator or all(isinstance(v, Tensor) or is_made(v) for v in values)

    def __call__(self, *values: Any) -> Tensor:
        """The function's result."""
        if not self._is_operator:
            return self._function(*values)
        tensors: list[Tensor] = []
        form = _form_of(values, tensors)
        with _LOCK:
            if form not in self._forms:
                self._forms.append(form)
            number = self._forms.index(form)
        return self._operator(tensors, number)

    def _run(self, tensors: list[Tensor], number: int) -> Tensor:
        return self._function(*_put_together(self._forms[number], tensors))

    @property
    def _is_operator(self) -> bool:
        return not reads_are_recorded()

    @property
    def _operator(self) -> Callable[..., Tensor]:
        name = self._function.__name__
        with _LOCK:
            if self._library is None:
                self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
                self._library.define(f"{name}(Tensor[] values, int form) -> Tensor")
                self._library.impl(name, self._run, "CPU")
        operator: Callable[..., Tensor] = getattr(torch.ops.backpack, name).default
        return operator


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor."""

    number: int


@dataclass(frozen=True)
class _Made:
    """Stands for a tuple, or for an object with attributes, that has tensors."""

    kind: type
    names: tuple[str, ...]
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class _Layer:
    """Stands for a module, of which only settings count: forms must not keep models alive."""

    kind: type[Module]
    settings: Settings


def _form_of(value: Any, tensors: list[Tensor]) -> Any:
    """A value with numbers instead of tensors, which are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, Module):
        return _Layer(type(value), settings_of(value))
    if not tensors_behind(value):
        return value
    own = {} if isinstance(value, tuple) else vars(value)
    parts = tuple(_form_of(part, tensors) for part in (own.values() if own else value))
    return _Made(type(value), tuple(own), parts)


def _put_together(form: Any, tensors: list[Tensor]) -> Any:
    """A value from its form and its tensors."""
    if isinstance(form, _Place):
        return tensors[form.number]
    if isinstance(form, _Layer):
        layer: Any = object.__new__(form.kind)
        vars(layer).update(zip(*form.settings, strict=True))
        return layer
    if not isinstance(form, _Made):
        return form
    parts = [_put_together(part, tensors) for part in form.parts]
    if not form.names:
        return tuple(parts)
    made: Any = object.__new__(form.kind)
    vars(made).update(zip(form.names, parts, strict=True))
    return made
