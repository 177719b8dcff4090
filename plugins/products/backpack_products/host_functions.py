"""Functions that may look at values on the host, although steps are recorded and repeated.

A recorder of torch's operations does not see what Python reads of values. So a recording would hold
one answer for good. A :class:`HostFunction` is a single operation in it, and looks anew each time.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from backpack_products._torch import is_on_host, reads_are_recorded

NAMESPACE: Final = "backpack"
_LOCK = Lock()


class HostFunction:
    """A function of tensors, which reads values on the host.

    It must depend on its arguments only, must not change them, and must return a tensor with memory
    of its own. A recorder with ``runs_host_functions`` sees one operation of torch,
    ``backpack::name``; one with ``reads_are_assumptions`` sees what the function does.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._library: torch.library.Library | None = None  # the operation ends with it
        self.__doc__ = function.__doc__

    def takes(self, *values: Any) -> bool:
        """Whether it may be called with these values: they are on the host, without a graph."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        if torch.is_grad_enabled() or not is_on_host(*tensors, allowed="runs_host_functions"):
            return False
        return len(tensors) == len(values) or not self._is_operator

    def __call__(self, *values: Any) -> Tensor:
        """The function's result."""
        return self._operator(*values) if self._is_operator else self._function(*values)

    @property
    def _is_operator(self) -> bool:
        return not reads_are_recorded()

    @property
    def _operator(self) -> Callable[..., Tensor]:
        name = self._function.__name__
        with _LOCK:
            if self._library is None:
                count = self._function.__code__.co_argcount
                arguments = ", ".join([f"Tensor {letter}" for letter in ascii_lowercase[:count]])
                self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
                self._library.define(f"{name}({arguments}) -> Tensor")
                self._library.impl(name, self._function, "CPU")
        operator: Callable[..., Tensor] = getattr(torch.ops.backpack, name).default
        return operator
