"""A number for each row of a tensor, by which equal rows are found when the tensor is gone."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

WHOLE: Final = -1
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, with bits in no order


class Sums(NamedTuple):
    """A number for each row of a tensor, so that equal rows are found when it is gone.

    Attributes:
        rows: The numbers, one for each entry of the leading axes.
        depth: How many axes a row has.
        unit: How many bytes were added up at a time; :data:`WHOLE` for rows of whole numbers.
    """

    rows: Tensor
    depth: int
    unit: int


class Made(NamedTuple):
    """What a layer made without a graph.

    Attributes:
        sums: Its rows.
        source: The rows that it was made of; ``None`` if they are those of the model's input.
    """

    sums: Sums
    source: Sums | None


def has_rows(tensor: Tensor) -> bool:
    """Whether a tensor has rows of numbers that are seldom equal; not a tensor of another kind."""
    is_plain = type(tensor) in (Tensor, Parameter)  # others may have no bits to add up
    return is_plain and tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() > 0


def has_tokens(tensor: Tensor) -> bool:
    """Whether a tensor has rows of whole numbers."""
    is_plain = type(tensor) is Tensor and tensor.dtype in (torch.int32, torch.int64)
    return is_plain and tensor.dim() > 1 and tensor.numel() > 0


def depth_of(tensor: Tensor) -> int:
    """How many axes a row has: one, or those of an image."""
    return max(1, tensor.dim() - 2)


def can_add(tensor: Tensor, depth: int, unit: int) -> bool:
    """Whether a tensor has rows of so many axes, and of whole units."""
    size = tensor.shape[-depth:].numel() * tensor.element_size()
    if unit == WHOLE or not has_rows(tensor):
        return unit == WHOLE and has_tokens(tensor) and tensor.dim() > depth
    return tensor.dim() > depth and not (unit and size % unit)


def sums_of(tensor: Tensor, depth: int = 0, unit: int = 0) -> Sums:
    """The sum of the bits of each row; of whole numbers, with a factor for each place."""
    depth, rows = depth or depth_of(tensor), tensor.detach() if tensor.requires_grad else tensor
    rows = rows if rows.is_contiguous() else rows.contiguous()  # each call takes its time
    rows = rows.flatten(-depth) if depth > 1 else rows
    if has_tokens(tensor):
        # Plain sums of different rows would be equal. Sums of products overflow, as they may.
        places = torch.arange(1, 1 + rows.shape[-1], device=rows.device)
        return Sums((rows * (places * _FACTOR + places**3)).sum(-1), depth, WHOLE)
    size = rows.element_size()
    # Fewer and longer integers are faster.
    unit = unit or (size if rows.shape[-1] * size % 8 else 8)
    return Sums(_added(rows.view(_BITS[unit]), -1), depth, unit)


def sums_of_pixels(images: Tensor) -> Sums:
    """The same for ``[N, C, H, W]``, of which ``C`` numbers are a row."""
    size = images.element_size()
    return Sums(_added(images.view(_BITS[size]), 1), 1, size)


def _added(bits: Tensor, axis: int) -> Tensor:
    """Sums along an axis; those of short integers with the first one, as few sums are different.

    Adding short integers up in long ones takes five times as long.
    """
    if bits.dtype is torch.int64:
        return bits.sum(axis)
    return (bits.sum(axis, dtype=torch.int32).long() << 32) + bits.select(axis, 0)
