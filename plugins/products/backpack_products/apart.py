"""Splits columns by sample, ``[V, R, *] → [V, N, R, *]``, and joins them again.

This is needed at tensors without samples, where the gradient is a sum over all samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.errors import SampleMixingError
from backpack_products.values import largest, rounding_unit


def owned_by(positions: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """The mask ``[N, R]`` of entries of axis 0 that belong to each sample.

    Args:
        positions: How many entries each sample has in a row, ``R = N · positions``; or the mask.
        rows: ``R``.
        device: For the result.
    """
    if isinstance(positions, Tensor):
        return positions
    every = torch.eye(rows // positions, dtype=torch.bool, device=device)
    return every.repeat_interleave(positions, 1)


def put_together(mat: Tensor, positions: int | Tensor) -> Tensor:
    """Join the columns of all samples: ``[V, N, R, *] → [V, R, *]``; reverses :func:`taken_apart`.

    Each sample's columns must be zero at the entries of all others.

    Args:
        mat: Columns of each sample, at a tensor that has samples.
        positions: How many entries each sample has in a row, ``R = N · positions``, or a mask ``[N,
            R]``; zero if the tensor has no samples, so that the columns are added.

    Returns:
        The sum over ``N``.

    Raises:
        SampleMixingError: The columns of a sample are not zero at the entries of another.
    """
    total, count = mat.sum(1), mat.shape[1]
    if isinstance(positions, int) and not positions:
        return total
    owned = owned_by(positions, mat.shape[2], mat.device) if mat.dim() > 2 else mat.new_empty(0)
    if not mat.numel() or owned.shape != (count, mat.shape[2]):
        return total
    owned = owned.to(mat.device).reshape(*owned.shape, *[1] * (mat.dim() - 3))
    own = torch.where(owned, mat, 0).sum(1)
    rest = mat.abs().sum(1) - own.abs()
    if bool((largest(rest) > largest(total.abs()) * rounding_unit(mat) ** 0.6).any()):
        raise SampleMixingError(
            "Samples of the batch influence each other, in a tensor that is computed from weights "
            "alone or that has samples on an axis other than the first. Say where samples are, "
            "extend(model, batch_axis=...), or which rows form one sample, samples=index. If you "
            "gave an index, look there first: it may name other samples than the model's."
        )
    return own


def taken_apart(mat: Tensor, owned: Tensor) -> Tensor:
    """Split columns by sample: for each sample, zeros at the entries of all others.

    Args:
        mat: Shape ``[V, R, *]``.
        owned: The mask of entries of each sample, ``[N, R]``.

    Returns:
        Shape ``[V, N, R, *]``.
    """
    owned = owned.to(mat.device).reshape(*owned.shape, *[1] * (mat.dim() - 2))
    return torch.where(owned, mat.unsqueeze(1), 0)
