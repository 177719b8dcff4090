"""Questions about the numbers in a tensor that have an answer for tensors without numbers, too.

Tensors of ``FakeTensorMode`` and of the device ``meta`` have a shape only. Whoever plans memory
with them wants shapes, and no error about values. Imports ``_torch`` only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from backpack_core._torch import casts
from backpack_core._torch import is_symbolic as is_symbolic
from backpack_core._torch import memory_of as memory_of

# Kinds of devices that torch may cast on.
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_NOTHING = nullcontext()


def any_of(mask: Tensor) -> bool:
    """Whether any entry of a mask is true; false for a tensor without values."""
    return not is_symbolic(mask) and bool(mask.any())


def largest(values: Tensor) -> Tensor:
    """The largest entry; zero if there is none."""
    return values.max() if values.numel() else torch.zeros_like(values.sum())


def at_least_single(tensor: Tensor) -> Tensor:
    """The tensor, in single precision if it was in half precision."""
    return tensor.float() if is_half(tensor.dtype) else tensor


def is_flag(value: object) -> bool:
    """Whether a value is a boolean of Python or torch, which would pass for an integer."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"


def is_half(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has less than single precision."""
    return dtype.is_floating_point and dtype.itemsize < 4


def without_autocast() -> AbstractContextManager[object]:
    """A block in which operations compute in the precision of their operands."""
    if not casts():
        return _NOTHING
    stack = ExitStack()
    for device in filter(torch.is_autocast_enabled, _DEVICES):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
