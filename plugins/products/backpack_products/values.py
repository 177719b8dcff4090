"""Questions about the numbers in a tensor that have an answer for tensors without numbers, too.

Tensors of ``FakeTensorMode`` and of the device ``meta`` have a shape only. Whoever plans memory
with them wants shapes, and no error about values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core._torch import memory_of as memory_of
from backpack_products._torch import is_symbolic as is_symbolic


def any_of(mask: Tensor) -> bool:
    """Whether any entry of a mask is true; false for a tensor without values."""
    return not is_symbolic(mask) and bool(mask.any())


def largest(values: Tensor) -> Tensor:
    """The largest entry; zero if there is none."""
    return values.max() if values.numel() else torch.zeros_like(values.sum())


def at_least_single(tensor: Tensor) -> Tensor:
    """The tensor, in single precision if it was in half precision."""
    return tensor.float() if is_half(tensor.dtype) else tensor


def is_half(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has less than single precision."""
    return dtype.is_floating_point and dtype.itemsize < 4


def is_flag(value: object) -> bool:
    """Whether a value is a boolean of Python or torch, which would pass for an integer."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
