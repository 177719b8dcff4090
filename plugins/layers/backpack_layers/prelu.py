"""The rule of the activation that has parameters."""

from __future__ import annotations

from torch import Tensor
from torch.nn import PReLU

from backpack_core.calls import ModuleCall
from backpack_core.rules import ElementwiseRule, ParametricRule


class PReLURule(ElementwiseRule, ParametricRule):
    """``y = max(0, x) + a min(0, x)``, with one slope ``a``, or one for each channel (axis 1)."""

    module_types = (PReLU,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """``1`` where ``x > 0``, else ``a``."""
        positive = (call.input > 0).to(call.dtype)
        return positive + self._slope(call) * (1 - positive)

    def _slope(self, call: ModuleCall) -> Tensor:
        """``a``, broadcastable to the input."""
        weight = call.parameter("weight")
        return weight.reshape(-1, *[1] * (len(call.input_shape) - 2)) if len(weight) > 1 else weight

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        product = mat * call.input.clamp(max=0)
        channels = call.parameter(name).shape[0]
        # A shared slope counts everything as one channel.
        return product.reshape(*mat.shape[:2], channels, -1).sum(3)

    def _param_jac_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        negative = call.input.clamp(max=0)
        channels = mat.shape[1]
        flat = negative.reshape(1, len(negative), channels, -1) * mat[:, None, :, None]
        return flat.reshape(len(mat), *negative.shape)
