"""Questions about the values of a tensor, with an answer for tensors without values, too.

Tensors of ``FakeTensorMode`` and of the device ``meta`` have a shape only. They are used to plan
memory, and an error about values must not stop that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import has_memory
from backpack_core._torch import memory_of as memory_of
from backpack_products._torch import any_hooks as any_hooks
from backpack_products._torch import is_onednn_on as is_onednn_on
from backpack_products._torch import is_symbolic as is_symbolic
from backpack_products._torch import kernels_of as kernels_of
from backpack_products._torch import look_of as look_of
from backpack_products._torch import saving_hooks as saving_hooks


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same address, which recorders do not allow to be read."""
    if not (has_memory(tensor) and has_memory(other)) or memory_of(tensor) != memory_of(other):
        return False
    return tensor.storage_offset() == other.storage_offset()


def has_double(device: torch.device) -> bool:
    """Whether a device has double precision."""
    return device.type != "mps"


def any_of(mask: Tensor) -> bool:
    """Whether any entry of a mask is true; false for a tensor without values."""
    return not is_symbolic(mask) and bool(mask.any())


def largest(values: Tensor) -> Tensor:
    """The largest entry; zero if there is none."""
    return values.max() if values.numel() else torch.zeros_like(values.sum())


# A GPU keeps ten bits of single precision in a product (TF32), as convolutions do by default.
_TF32 = 2.0**-10


def rounding_unit(tensor: Any) -> float:
    """The relative rounding error of a number in a product.

    A GPU may multiply single precision in TF32, and two tensors that are compared may come from
    different kernels.

    Args:
        tensor: A tensor of real numbers, or anything that has its ``dtype`` and ``device``.
    """
    eps = torch.finfo(tensor.dtype).eps
    is_short = tensor.dtype is torch.float32 and tensor.device.type == "cuda"
    return max(eps, _TF32) if is_short else eps


# What is left of terms that cancel must exceed rounding by this factor, so that three digits are
# right. The norm of a sum of independent positions does, up to 8,000 of them.
_LEFT = 1e3
_LOOKED_AT = 2**16  # numbers at a time


def above_rounding(left: Tensor, most: Tensor, dtype: torch.dtype, count: float = 1.0) -> Tensor:
    """What is left of terms that cancel, less what it must be so that three digits are right.

    Args:
        left: Sums of the terms; not negative but for rounding.
        most: The sums if no terms cancelled.
        dtype: The precision in which the terms were added up.
        count: A factor of ``most``, or of the rounding.
    """
    return torch.sub(left, most, alpha=_LEFT * torch.finfo(dtype).eps * count)


def is_lost(left: Tensor, most: Tensor, dtype: torch.dtype, count: float = 1.0) -> bool:
    """Whether any of the sums of :func:`above_rounding` may lack digits, or left the range."""
    if not left.numel():
        return False
    parts: Iterable[tuple[Tensor, Tensor]] = ((left, most),)
    if left.numel() > _LOOKED_AT:  # parts need no fresh memory
        flat = left.flatten(), most.flatten()
        parts = zip(*[each.split(_LOOKED_AT) for each in flat], strict=True)
    # A minimum is faster than a mask; it is not a number if one of them is not.
    return any(not above_rounding(*part, dtype, count).amin() >= 0 for part in parts)


def at_least_single(tensor: Tensor) -> Tensor:
    """The tensor, in single precision if it was in half precision."""
    return tensor.float() if is_half(tensor.dtype) else tensor


def is_half(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has less than single precision."""
    return dtype.is_floating_point and dtype.itemsize < 4


def is_flag(value: object) -> bool:
    """Whether a value is a boolean of Python or torch, which would also pass as an integer."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
