"""Covariances of inputs and columns in weight-sharing form: the factors of Kronecker products."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.contract.contractions import Rows, row_steps, slices
from backpack_core.tuning import SYMMETRIC


def outer_sum(inp: Rows, itemsize: int, scale: float = 1.0, mean: bool = False) -> Tensor:
    """``scale · Σ_n Σ_s inp ⊗ inp``. Shape ``[G, I, I]``.

    Args:
        inp: Shape ``[N, S, G, I]``.
        itemsize: Bytes of one number.
        scale: A factor.
        mean: Average over the positions ``s`` first: ``Σ_n (mean_s inp) ⊗ (mean_s inp)``.
    """
    positions = inp.shape[1]
    if not inp.shape.numel():
        return inp[:].new_zeros(*inp.shape[2:], inp.shape[3])
    total: Tensor | None = None
    for rows in row_steps(inp, itemsize):
        part = inp[rows]
        if mean:
            part = part.mean(1, keepdim=True)
        if part.shape[1] == 1 or part.stride(0) == positions * part.stride(1):
            total = _add_outer(total, part.flatten(0, 1))
            continue
        # Patches lie as [I, S]: a product for each sample is cheaper than copying them together.
        for sample in part:
            total = _add_outer(total, sample)
    assert total is not None
    total = _mirrored(total)
    return total * scale if torch.is_grad_enabled() else total.mul_(scale)


def outer(rows: Tensor) -> Tensor:
    """``Σ_m rows[m] ⊗ rows[m]`` for ``[M, G, I]``. Shape ``[G, I, I]``."""
    if not rows.numel():
        return rows.new_zeros(*rows.shape[1:], rows.shape[2])
    return _mirrored(_add_outer(None, rows))


def _add_outer(total: Tensor | None, rows: Tensor) -> Tensor:
    """``total + Σ_m rows[m] ⊗ rows[m]``, on and above the diagonal; in place without autograd."""
    size = rows.shape[2]
    step = _band(size)
    if torch.is_grad_enabled() or step == size:
        left, right = rows.permute(1, 2, 0), rows.transpose(0, 1)
        if total is None:
            return torch.bmm(left, right)
        return torch.baddbmm(total, left, right, out=None if torch.is_grad_enabled() else total)
    if total is None:
        total = rows.new_zeros(rows.shape[1], size, size)
    for target, group in zip(total, rows.unbind(1), strict=True):
        for band in slices(size, step):
            target[band, band.start :].addmm_(group[:, band].T, group[:, band.start :])
    return total


def _mirrored(total: Tensor) -> Tensor:
    """What :func:`_add_outer` left out, from above the diagonal."""
    size = total.shape[-1]
    step = _band(size)
    if torch.is_grad_enabled() or step == size:
        return total
    for band in slices(size, step):
        total[:, band.stop :, band] = total[:, band, band.stop :].mT
    return total


def _band(size: int) -> int:
    """Rows of a symmetric product to form at a time: large ones go in four bands."""
    return size if size < SYMMETRIC else -(-size // 4)
