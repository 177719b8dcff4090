"""Rule of ``nn.Linear``, with any number of axes between batch and features."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.nn import Linear

from backpack_core.record.view import View
from backpack_layers import operands  # noqa: F401 - registers its products
from backpack_layers.layout import require_axes
from backpack_products.multiply import multiply
from backpack_products.parametric import AffineRule


class LinearRule(AffineRule):
    """``y = x Wᵀ + b``; the axes between batch and features are the shared positions."""

    module_types = (Linear,)
    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_axes(view, 2, "[N, ..., in_features]")

    def affine_input(self, view: View) -> Tensor:
        """The input, a view."""
        x = view.input
        samples, *positions, features = x.shape
        return x.reshape(samples, prod(positions), 1, features)

    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        """The columns, a view."""
        columns, samples, *positions, features = mat.shape
        return mat.reshape(columns, samples, prod(positions), 1, features)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        weight = view.parameter("weight")
        # One product for all rows; for unusual strides, ``@`` would use a batched product.
        return multiply(mat.flatten(0, -2), weight).reshape(*mat.shape[:-1], weight.shape[1])
