"""Columns of every sample by themselves, and put together again.

A plain sum over samples would lose whose the columns were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.errors import SampleMixingError
from backpack_products.values import largest, rounding_unit


def owned_by(positions: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """Which entries of axis 0 each sample has, ``[N, R]``.

    Args:
        positions: How many, side by side, ``R = N · positions``; or which they are.
        rows: ``R``.
        device: For the result.
    """
    if isinstance(positions, Tensor):
        return positions
    every = torch.eye(rows // positions, dtype=torch.bool, device=device)
    return every.repeat_interleave(positions, 1)


def put_together(mat: Tensor, positions: int | Tensor) -> Tensor:
    """The reverse of :func:`taken_apart`: ``[V, N, R, *] → [V, R, *]``.

    Each sample's entries are taken from its own columns; those of other samples have to be zero
    there.

    Args:
        mat: Columns of every sample apart, at a tensor that has samples.
        positions: How many entries each sample has, ``R = N · positions``, or which they are, ``[N,
            R]``; zero if the tensor has none, so that columns are added.

    Returns:
        The sum over the second axis.

    Raises:
        SampleMixingError: Something of one sample reaches the entries of another.
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
            "Samples of the batch influence each other, in what is computed from weights alone or "
            "has its samples on another axis than the first. Say where samples are, extend(model, "
            "batch_axis=...), or which rows are one sample, backpack(..., samples=index)."
        )
    return own


def taken_apart(mat: Tensor, owned: Tensor) -> Tensor:
    """For each sample, the columns with zeros at the entries of all others.

    Args:
        mat: Shape ``[V, R, *]``.
        owned: Which entries each sample has, ``[N, R]``.

    Returns:
        Shape ``[V, N, R, *]``.
    """
    owned = owned.to(mat.device).reshape(*owned.shape, *[1] * (mat.dim() - 2))
    return torch.where(owned, mat.unsqueeze(1), 0)
