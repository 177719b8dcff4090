"""What is asked of numbers: whether any are true, which is largest, in what precision they come.

Tensors of ``FakeTensorMode`` and of the device ``meta`` have a shape and nothing else: whoever
plans memory with them wants shapes, and no complaint about values that nobody knows. Imports
``_torch`` only.
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
    """Whether an entry of a mask is true; false where there are no values."""
    return not is_symbolic(mask) and bool(mask.any())


def largest(values: Tensor) -> Tensor:
    """The largest entry, zero of none."""
    return values.max() if values.numel() else torch.zeros_like(values.sum())


def at_least_single(tensor: Tensor) -> Tensor:
    """Single precision in the place of half precision."""
    return tensor.float() if is_half(tensor.dtype) else tensor


def is_flag(value: object) -> bool:
    """Whether a value is true or false, of Python's or torch's, which pass for integers, too."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"


def is_half(dtype: torch.dtype) -> bool:
    """Whether numbers have less than single precision."""
    return dtype.is_floating_point and dtype.itemsize < 4


def without_autocast() -> AbstractContextManager[object]:
    """Within the block, operations keep the precision they are given."""
    if not casts():
        return _NOTHING
    stack = ExitStack()
    for device in filter(torch.is_autocast_enabled, _DEVICES):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
