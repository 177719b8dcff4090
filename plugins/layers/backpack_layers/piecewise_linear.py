"""Rules of piecewise linear activations: their second derivative is zero.

Where torch can work in place, the output stands in for the input as far as it says enough. The
other rules need the input, and say so when it was overwritten.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import (
    Hardshrink,
    Hardsigmoid,
    Hardtanh,
    LeakyReLU,
    PReLU,
    ReLU,
    ReLU6,
    RReLU,
    Softshrink,
    Threshold,
)

from backpack_core.calls import ModuleCall
from backpack_core.errors import OverwrittenInputError
from backpack_core.rules import ElementwiseRule, ParametricRule


class ReLURule(ElementwiseRule):
    """``max(x, 0)``."""

    module_types = (ReLU,)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """One where the output is positive."""
        return call.output.sign()

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        if type(self).derivative is not ReLURule.derivative:
            return super()._jac_t_mat_prod(call, mat)
        # One pass instead of two.
        product: Tensor = torch.ops.aten.threshold_backward(mat, call.output, 0)
        return product

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(call, mat)


class HardtanhRule(ElementwiseRule):
    """``x`` cut to an interval; ``ReLU6`` cuts to ``[0, 6]``."""

    module_types = (Hardtanh, ReLU6)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """One strictly inside the interval, which input and output agree about."""
        module = cast(Hardtanh, call.module)
        x = _either(call)
        return ((x > module.min_val) & (x < module.max_val)).to(x.dtype)


class LeakyReLURule(ElementwiseRule):
    """``x`` where it is positive, ``a x`` elsewhere."""

    module_types = (LeakyReLU,)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """Input and output have one sign: torch refuses a negative slope in place."""
        return _slopes(_either(call), cast(LeakyReLU, call.module).negative_slope)


class RReLURule(ElementwiseRule):
    """A leaky ReLU whose slopes are drawn at random in train mode."""

    module_types = (RReLU,)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """In train mode, the drawn slopes are output over input."""
        module = cast(RReLU, call.module)
        if not call.training:
            return _slopes(_either(call), (module.lower + module.upper) / 2)
        x = call.input
        if bool((x == 0).any()):
            raise OverwrittenInputError(
                f"{call.path} drew random slopes that are not stored, and they cannot be told from "
                "its output where its input is zero. Call eval() on the module."
            )
        return torch.where(x > 0, 1.0, call.output / x)


class ThresholdRule(ElementwiseRule):
    """``x`` above a threshold, a constant elsewhere."""

    module_types = (Threshold,)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """The output tells as much as the input if the constant is not above the threshold."""
        module = cast(Threshold, call.module)
        x = _either(call) if module.value <= module.threshold else call.input
        return (x > module.threshold).to(x.dtype)


class ShrinkRule(ElementwiseRule):
    """``Softshrink`` and ``Hardshrink``: zero near zero."""

    module_types = (Softshrink, Hardshrink)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """One outside of ``[-λ, λ]``."""
        x = call.input
        return (x.abs() > cast(Softshrink, call.module).lambd).to(x.dtype)


class HardsigmoidRule(ElementwiseRule):
    """``x / 6 + 1 / 2`` cut to ``[0, 1]``."""

    module_types = (Hardsigmoid,)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """``1 / 6`` where nothing is cut."""
        x = call.input
        return (x.abs() < 3).to(x.dtype) / 6


class PReLURule(ElementwiseRule, ParametricRule):
    """A leaky ReLU whose slope is learned, one for all channels or one for each."""

    module_types = (PReLU,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """One where the input is positive, the slope elsewhere."""
        x = call.input
        return torch.where(x > 0, 1.0, self._per_channel(call, call.parameter("weight")))

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        product = mat * call.input.clamp(max=0)
        shape = call.parameter(name).shape
        if shape.numel() == 1:
            return product.reshape(*mat.shape[:2], -1).sum(2, keepdim=True)
        return product.reshape(*mat.shape[:3], -1).sum(3)

    def _param_jac_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        return self._per_channel(call, mat) * call.input.clamp(max=0)

    def _per_channel(self, call: ModuleCall, values: Tensor) -> Tensor:
        """``[..., C]`` (or one value for all) to where it multiplies ``[..., N, C, *]``."""
        dims = len(call.input_shape)
        if dims == 1:
            return values.reshape(*values.shape[:-1], -1)
        return values.reshape(*values.shape[:-1], 1, -1, *[1] * (dims - 2))


def _either(call: ModuleCall) -> Tensor:
    """The input, or the output in its place, for formulas that hold with both."""
    return call.output if cast(Any, call.module).inplace else call.input


def _slopes(x: Tensor, negative: float) -> Tensor:
    return torch.where(x > 0, 1.0, x.new_full((), negative))
