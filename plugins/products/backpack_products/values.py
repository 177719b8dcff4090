"""Questions about the numbers in a tensor, and about their precision."""

from __future__ import annotations

import torch
from torch import Tensor


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
