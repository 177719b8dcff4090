"""Covariances of inputs and columns in weight-sharing form: the factors of Kronecker products."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products.contractions import row_steps, slices
from backpack_products.multiply import add_product, multiply
from backpack_products.rows import DirectRows, Rows
from backpack_products.tuning import SYMMETRIC, WHOLE
from backpack_products.values import at_least_single

# From this many vectors on, forming half of a symmetric product and mirroring it is faster.
MANY = 256


def outer_sum(inp: Rows, itemsize: int, scale: float = 1.0, mean: bool = False) -> Tensor:
    """``scale · Σ_n Σ_s inp ⊗ inp``. Shape ``[G, I, I]``.

    Args:
        inp: Shape ``[N, S, G, I]``.
        itemsize: Bytes of one number.
        scale: A factor.
        mean: Average over the positions ``s`` first: ``Σ_n (mean_s inp) ⊗ (mean_s inp)``.
    """
    positions = inp.shape[1]
    mean = mean and positions > 1
    if not inp.shape.numel():
        return inp[:].new_zeros(*inp.shape[2:], inp.shape[3])
    if mean and isinstance(inp, DirectRows):
        return outer(inp.position_sum() / positions, scale)
    band = _band(inp.shape[3], inp.shape[0] * (1 if mean else positions))
    total: Tensor | None = None
    steps = [*row_steps(inp, itemsize)]
    for samples in steps:
        part = inp[samples]
        if mean:
            part = part.mean(1, keepdim=True)
        is_joint = part.shape[1] == 1 or part.stride(0) == positions * part.stride(1)
        # Patches are stored as [I, S]: a product for each sample is cheaper than one joint copy.
        groups = [part.flatten(0, 1)] if is_joint else part.unbind()
        is_one = len(steps) * len(groups) == 1  # a sum of several is kept in single precision
        for vectors in groups:
            total = _add_outer(total, vectors if is_one else at_least_single(vectors), band, scale)
    assert total is not None
    return _mirrored(total, band).to(part.dtype)


def outer(vectors: Tensor, scale: float = 1.0) -> Tensor:
    """``scale · Σ_m vectors[m] ⊗ vectors[m]`` for ``[M, G, I]``. Shape ``[G, I, I]``."""
    if not vectors.numel():
        return vectors.new_zeros(*vectors.shape[1:], vectors.shape[2])
    band = _band(vectors.shape[2], len(vectors))
    return _mirrored(_add_outer(None, vectors, band, scale), band)


def _add_outer(total: Tensor | None, vectors: Tensor, step: int, scale: float) -> Tensor:
    """``total + scale · Σ_m vectors[m] ⊗ vectors[m]``, on and above the diagonal only.

    Formed in bands of ``step`` rows; added to ``total`` in place if autograd allows it.
    """
    size = vectors.shape[2]
    left, right = vectors.permute(1, 2, 0), vectors.transpose(0, 1)
    if torch.is_grad_enabled():
        product = torch.bmm(left, right) * scale
        return product if total is None else total + product
    beta = 0.0 if total is None else 1.0  # with beta = 0, total is not read
    is_whole, is_small = step == size, vectors.numel() * size < WHOLE
    if total is None and is_whole and not is_small and len(left) == 1:
        product = multiply(left[0], right[0]).unsqueeze(0)  # without a copy into other memory
        return product if scale == 1 else product.mul_(scale)
    if total is None:
        total = vectors.new_empty(len(left), size, size)
    if is_whole and (is_small or len(left) > 1):
        return torch.baddbmm(total, left, right, beta=beta, alpha=scale, out=total)
    for target, group in zip(total, vectors.unbind(1), strict=True):
        for band in slices(size, step):
            place, rest = target[band, band.start :], group[:, band.start :]
            add_product(place, group[:, band].T, rest, beta, scale)
    return total


def _mirrored(total: Tensor, step: int) -> Tensor:
    """Fill the entries below the diagonal, which :func:`_add_outer` left out, by symmetry."""
    size = total.shape[-1]
    if torch.is_grad_enabled() or step == size:
        return total
    for band in slices(size, step):
        total[:, band.stop :, band] = total[:, band, band.stop :].mT
    return total


def _band(size: int, count: int) -> int:
    """How many rows to form at a time: a quarter for large products, else all."""
    return size if size < SYMMETRIC or count < MANY else -(-size // 4)
