"""Every use of torch's private interface in this package."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from backpack_core._hooks import move_first

T = TypeVar("T")

# Whether a profiler of torch is recording.
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled


def hook_leaf_first(leaf: Tensor, owner: T, hear: Callable[[T, Tensor, Tensor], None]) -> Any:
    """Have autograd call ``hear(owner, leaf, gradient)`` before all other hooks of a leaf.

    The hook has weak references to owner and leaf. Returns a handle that removes the hook.
    """
    owner_reference, leaf_reference = weakref.ref(owner), weakref.ref(leaf)

    def hook(gradient: Tensor | None) -> None:
        living, tensor = owner_reference(), leaf_reference()
        if living is not None and tensor is not None and gradient is not None:
            hear(living, tensor, gradient)

    handle = leaf.register_hook(hook)
    table: Any = leaf._backward_hooks
    move_first(table, handle.id)
    return handle
