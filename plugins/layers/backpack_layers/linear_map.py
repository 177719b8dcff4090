"""Base class of linear layers without parameters: columns folded into the batch, transposition."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from backpack_core.record.view import View
from backpack_products.derivatives import SecondOrderRule
from backpack_products.transposition import transpose


def over_columns(function: Callable[[Tensor], Tensor], mat: Tensor) -> Tensor:
    """Apply a function of ``[N, *]`` to ``[V, N, *]`` in one call; it must treat samples alike."""
    product: Tensor = function(mat.flatten(0, 1)).unflatten(0, mat.shape[:2])
    return product


def transposed(function: Callable[[Tensor], Tensor], shape: Sequence[int], mat: Tensor) -> Tensor:
    """Apply the transpose of a linear function.

    Args:
        function: Linear, ``[M, *in] → [M, *out]``, treats samples alike.
        shape: Shape ``[*in]``.
        mat: Columns. Shape ``[V, N, *out]``.

    Returns:
        Shape ``[V, N, *in]``.
    """
    folded = mat.flatten(0, 1)
    product: Tensor = transpose(function, (len(folded), *shape), folded).unflatten(0, mat.shape[:2])
    return product


class LinearMapRule(SecondOrderRule):
    """A layer whose output is a linear (or affine) function of the input, without parameters."""

    hessian_is_zero = True
    jacobian_is_constant = True

    @abstractmethod
    def apply(self, view: View, x: Tensor) -> Tensor:
        """The linear part of the layer: ``[M, *in] → [M, *out]``, for any number ``M``."""

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return transposed(lambda x: self.apply(view, x), view.input_shape[1:], mat)
