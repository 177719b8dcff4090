"""Decompositions and products of Kronecker factors as tensors. Imports torch, errors and values."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from backpack_core.autocast import without_autocast
from backpack_core.errors import UsageError
from backpack_products.multiply import multiply_each
from backpack_products.values import any_of, at_least_single


def eigh(matrix: Tensor, is_measured: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices, in their dtype.

    The decomposition uses at least single precision, since torch has none in half precision.
    Eigenvalues within rounding errors of zero are set to zero, so that singular matrices are found.

    Args:
        matrix: Shape ``[..., D, D]``.
        is_measured: Whether values may be read. If not, the results of a matrix that is not finite
            are NaN, since torch does not define them.

    Raises:
        UsageError: The matrix is not finite, or the iteration does not converge.
    """
    is_finite = matrix.isfinite()
    if not is_measured:
        matrix = torch.where(is_finite, matrix, 0.0)
    elif any_of(~is_finite):
        raise UsageError(
            f"A matrix of shape {list(matrix.shape)} has no eigenvalues, since it is not finite: "
            "look for inf or nan in the loss and in the outputs of the net."
        )
    try:
        values, vectors = torch.linalg.eigh(at_least_single(matrix))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise UsageError(
            f"Torch did not find the eigenvalues of a matrix of shape {list(matrix.shape)} "
            f"({error}): compute the matrix in torch.float64, or scale the loss, so that the sizes "
            "of its entries differ less."
        ) from error
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps
    bound = rounding * values.detach().abs().amax(-1, keepdim=True) if values.numel() else 0.0
    values = torch.where(values.abs() > bound, values, 0.0)
    if not is_measured:
        is_known = is_finite.all(-1, keepdim=True).all(-2)  # [..., 1]
        values = torch.where(is_known, values, nan)
        vectors = torch.where(is_known.unsqueeze(-1), vectors, nan)
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def multiply(factors: Sequence[Tensor | None], sizes: Sequence[int], coordinates: Tensor) -> Tensor:
    """``(F₁ ⊗ F₂ ⊗ …) coordinates`` for each block. Shape ``[V, P] → [V, P]``.

    Args:
        factors: Matrices ``[D_k, D_k]`` or ``[G, D_k, D_k]``, diagonals ``[D_k]`` or ``[G, D_k]``;
            ``None`` for the identity.
        sizes: ``G`` and every ``D_k``.
        coordinates: Vectors.
    """
    product = coordinates.reshape(len(coordinates), *sizes).transpose(0, 1)  # [G, V, D_1, D_2, …]
    has_groups = sizes[0] > 1
    for axis, factor in enumerate(factors, start=2):
        if factor is None:
            continue
        last = product.movedim(axis, -1)
        flat = last.flatten(1, -2)
        with without_autocast():
            if factor.dim() - has_groups == 1:
                flat = flat * factor.unsqueeze(-2)
            else:
                flat = multiply_each(flat, factor.mT.expand(len(flat), -1, -1))
        product = flat.reshape(last.shape).movedim(-1, axis)
    return product.transpose(0, 1).reshape(coordinates.shape)
