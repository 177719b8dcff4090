"""Questions about the numbers in a tensor that have an answer for tensors without numbers, too.

Tensors of ``FakeTensorMode`` and of the device ``meta`` have a shape only. Whoever plans memory
with them wants shapes, and no error about values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import has_memory
from backpack_core._torch import memory_of as memory_of
from backpack_products._torch import is_at_hand as is_at_hand
from backpack_products._torch import is_symbolic as is_symbolic


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at one place. No address is read, which a recorder would see."""
    if not (has_memory(tensor) and has_memory(other)) or memory_of(tensor) != memory_of(other):
        return False
    return tensor.storage_offset() == other.storage_offset()


def any_of(mask: Tensor) -> bool:
    """Whether any entry of a mask is true; false for a tensor without values."""
    return not is_symbolic(mask) and bool(mask.any())


def largest(values: Tensor) -> Tensor:
    """The largest entry; zero if there is none."""
    return values.max() if values.numel() else torch.zeros_like(values.sum())


# A GPU keeps ten bits of single precision in a product (TF32), as convolutions do by default.
_TF32 = 2.0**-10


def rounding_unit(tensor: Any) -> float:
    """How far a number of a product may be from the exact one, relative to it.

    On a GPU, single precision may be multiplied with the bits of half precision, and what is
    compared need not take the same kernels.

    Args:
        tensor: A tensor of real numbers, or anything that has its ``dtype`` and ``device``.
    """
    eps = torch.finfo(tensor.dtype).eps
    is_short = tensor.dtype is torch.float32 and tensor.device.type == "cuda"
    return max(eps, _TF32) if is_short else eps


def at_least_single(tensor: Tensor) -> Tensor:
    """The tensor, in single precision if it was in half precision."""
    return tensor.float() if is_half(tensor.dtype) else tensor


def is_half(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has less than single precision."""
    return dtype.is_floating_point and dtype.itemsize < 4


def is_flag(value: object) -> bool:
    """Whether a value is a boolean of Python or torch, which would pass for an integer."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
