"""Every use of torch's private interface in this package. Imports torch only."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_symbolic(tensor: Tensor) -> bool:
    """Whether a tensor has a shape, but no values (``FakeTensorMode``, ``meta``)."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_at_hand(tensor: Tensor) -> bool:
    """Whether to look at numbers is free: they are on the host, and nobody records who looks."""
    return (
        not torch.compiler.is_compiling()
        and tensor.is_cpu
        and not torch.is_grad_enabled()
        and _get_current_dispatch_mode() is None
        and torch._C._functorch.peek_interpreter_stack() is None
        and not is_symbolic(tensor)
    )


def holders_of(tensor: Tensor) -> tuple[int, ...] | None:
    """How many hold a tensor, its base and its storage, in Python and below; ``None`` if unknown.

    Views, arrays, graphs and lists all show in one of these counts.
    """
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    storage, base = tensor.untyped_storage(), tensor._base
    found: list[int] = [sys.getrefcount(tensor), sys.getrefcount(storage), count(storage._cdata)]
    for one in (tensor,) if base is None else (tensor, base):
        found.append(one._use_count())  # type: ignore[attr-defined]
    return (*found, sys.getrefcount(base))
