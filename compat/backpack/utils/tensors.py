"""Functions on tensors. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor


def no_op(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def subsample(tensor: Tensor, dim: int = 0, subsampling: Sequence[int] | None = None) -> Tensor:
    """Choose entries along an axis.

    Args:
        tensor: The tensor.
        dim: The axis.
        subsampling: Indices of the entries; ``None`` for all.

    Returns:
        A tensor of the same number of axes.
    """
    if subsampling is None:
        return tensor
    return tensor[(slice(None),) * dim + (list(subsampling),)]


def kfacmp_unsqueeze_if_missing_dim(
    mat_dim: int,
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Let a function of matrices take vectors.

    Args:
        mat_dim: Number of axes that the function's argument has.

    Returns:
        A decorator. The function then also takes a tensor with one axis fewer, as a single column.
    """

    def decorate(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @wraps(function)
        def wrapped(mat: Tensor) -> Tensor:
            if mat.dim() != mat_dim - 1:
                return function(mat)
            return function(mat.unsqueeze(-1)).squeeze(-1)

        return wrapped

    return decorate
