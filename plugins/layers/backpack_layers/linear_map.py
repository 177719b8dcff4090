"""What rules of linear maps share: columns folded into the batch, and transposition."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backpack_core.contract.rules import LayerRule
from backpack_core.record.view import View


def over_columns(function: Callable[[Tensor], Tensor], mat: Tensor) -> Tensor:
    """Apply a function of ``[N, *]`` that treats samples alike to ``[V, N, *]``, in one call."""
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
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        origin = mat.new_zeros(mat.shape[0] * mat.shape[1], *shape, requires_grad=True)
        image = function(origin)
    (folded,) = torch.autograd.grad(image, origin, mat.flatten(0, 1), create_graph=differentiable)
    product: Tensor = folded.unflatten(0, mat.shape[:2])
    return product


class LinearMapRule(LayerRule):
    """A layer whose output is a linear (or affine) function of the input, without parameters."""

    hessian_is_zero = True
    jacobian_is_constant = True

    @abstractmethod
    def apply(self, view: View, x: Tensor) -> Tensor:
        """The linear part of the layer: ``[M, *in] → [M, *out]``, for any number ``M``."""

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return transposed(lambda x: self.apply(view, x), view.input_shape[1:], mat)

    def _jac_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return over_columns(lambda x: self.apply(view, x), mat)
