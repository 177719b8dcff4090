"""Rule of ``nn.Linear``, with any number of axes between batch and features."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Linear

from backpack_core.calls import ModuleCall
from backpack_core.rules import AffineRule
from backpack_layers.layout import require_axes


class LinearRule(AffineRule):
    """``y = x Wᵀ + b``; the axes between batch and features are the shared positions."""

    module_types = (Linear,)
    jacobian_is_constant = True

    def check(self, call: ModuleCall) -> None:
        """Refuse an input without a batch axis."""
        require_axes(call, 2, "[N, ..., in_features]")

    def affine_input(self, call: ModuleCall) -> Tensor:
        """The input, a view."""
        x = call.input
        return x.reshape(x.shape[0], x.shape[1:-1].numel(), 1, x.shape[-1])

    def affine_output(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """The columns, a view."""
        return mat.reshape(*mat.shape[:2], mat.shape[2:-1].numel(), 1, mat.shape[-1])

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return _times(mat, call.parameter("weight"))

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return _times(mat, call.parameter("weight").T)

    def _param_jac_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        shape = call.output_shape
        if name == "bias":
            columns = mat.reshape(len(mat), *[1] * (len(shape) - 1), shape[-1])
            return columns.expand(-1, *shape)
        product = call.input.flatten(0, -2) @ mat.mT
        return product.reshape(len(mat), *shape)


def _times(mat: Tensor, weight: Tensor) -> Tensor:
    """One product for all rows; ``@`` makes a batch of them if the strides are unusual."""
    return (mat.reshape(-1, mat.shape[-1]) @ weight).reshape(*mat.shape[:-1], weight.shape[1])
