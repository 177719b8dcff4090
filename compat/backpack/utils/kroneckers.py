"""Products and inverses with Kronecker factors. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from string import ascii_lowercase

import torch
from torch import Tensor

from backpack.utils.tensors import kfacmp_unsqueeze_if_missing_dim

Shift = float | Sequence[float] | None


def kfacs_to_mat(factors: Iterable[Tensor]) -> Tensor | None:
    """``A ⊗ B ⊗ …``; ``None`` for no factor."""
    matrices = list(factors)
    assert all(is_matrix(factor) for factor in matrices), "Kronecker factors are matrices."
    return reduce(two_kfacs_to_mat, matrices) if matrices else None


def two_kfacs_to_mat(A: Tensor, B: Tensor) -> Tensor:
    """``A ⊗ B``."""
    assert all_tensors_of_order(2, (A, B)), "Kronecker factors are matrices."
    return torch.kron(A, B)


def kfac_mat_prod(factors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """The function ``M ↦ (A ⊗ B ⊗ …) M``, for a matrix or a vector."""
    assert all_tensors_of_order(2, factors), "Kronecker factors are matrices."
    columns = [factor.shape[1] for factor in factors]

    @kfacmp_unsqueeze_if_missing_dim(mat_dim=2)
    def product(mat: Tensor) -> Tensor:
        assert is_matrix(mat), "The argument is a matrix or a vector."
        result = mat.reshape(*columns, mat.shape[1])
        for axis, factor in enumerate(factors):
            result = torch.tensordot(factor, result, ([1], [axis])).movedim(0, axis)
        return result.reshape(prod(factor.shape[0] for factor in factors), mat.shape[1])

    return product


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """``(A ⊗ B ⊗ …) M``."""
    return kfac_mat_prod(factors)(mat)


def inv_kfac_mat_prod(factors: Sequence[Tensor], shift: Shift = None) -> Callable[[Tensor], Tensor]:
    """The function ``M ↦ [(A + λ₁I)⁻¹ ⊗ (B + λ₂I)⁻¹ ⊗ …] M``."""
    return kfac_mat_prod(inv_kfacs(factors, shift))


def apply_inv_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor, shift: Shift = None) -> Tensor:
    """``[(A + λ₁I)⁻¹ ⊗ (B + λ₂I)⁻¹ ⊗ …] M``."""
    return inv_kfac_mat_prod(factors, shift)(mat)


def inv_kfacs(factors: Sequence[Tensor], shift: Shift = None) -> list[Tensor]:
    """``[(A + λ₁I)⁻¹, (B + λ₂I)⁻¹, …]`` of symmetric factors.

    Args:
        factors: ``[A, B, …]``.
        shift: ``[λ₁, λ₂, …]``, or one number for all; default: none.

    Returns:
        The inverses. The inverse of an eigenvalue is kept below 1e8 in absolute value.
    """
    if isinstance(shift, (tuple, list)):
        shifts = list(shift)
        assert len(shifts) == len(factors), "There is one shift for each factor."
    else:
        shifts = [0.0 if shift is None else shift] * len(factors)
    return [_inverse(factor, value) for factor, value in zip(factors, shifts, strict=True)]


def _inverse(mat: Tensor, shift: float, largest: float = 1e8) -> Tensor:
    values, vectors = torch.linalg.eigh(mat)
    inverse: Tensor = vectors * (1 / (values + shift)).clamp(-largest, largest) @ vectors.T
    return inverse


def all_tensors_of_order(order: int, tensors: Iterable[Tensor]) -> bool:
    """Whether all have this number of axes."""
    return all(is_tensor_of_order(order, tensor) for tensor in tensors)


def is_tensor_of_order(order: int, tensor: Tensor) -> bool:
    """Whether it has this number of axes."""
    return tensor.dim() == order


def is_matrix(tensor: Tensor) -> bool:
    """Whether it has two axes."""
    return is_tensor_of_order(2, tensor)


def is_vector(tensor: Tensor) -> bool:
    """Whether it has one axis."""
    return is_tensor_of_order(1, tensor)


def get_letters(max_letters: int = 26) -> Iterator[str]:
    """The letters ``"a"``, ``"b"``, and so on."""
    yield from ascii_lowercase[:max_letters]
