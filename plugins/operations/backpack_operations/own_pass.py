"""Calls nodes from inside a backward pass that may have excluded them.

In a pass with ``inputs=...``, nodes leave out gradients that autograd does not need, whoever calls
them. A nested pass without ``inputs`` is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from backpack_core._torch import Node, will_execute

T = TypeVar("T")


def beside_pass(function: Callable[[], T], called: Iterable[Node], device: torch.device) -> T:
    """Call a function that calls nodes, in a pass of its own if the current pass excludes any."""
    return function() if all(map(will_execute, called)) else in_own_pass(function, device)


def in_own_pass(function: Callable[[], T], device: torch.device) -> T:
    """Call a function inside a separate backward pass; returns its result."""
    results: list[T] = []
    is_differentiable = torch.is_grad_enabled()

    def call(_: Tensor) -> None:
        with torch.set_grad_enabled(is_differentiable):
            results.append(function())

    with torch.enable_grad():
        root = torch.zeros((), device=device, requires_grad=True).clone()
    root.register_hook(call)
    root.backward()  # a pass without inputs=
    return results[0]
