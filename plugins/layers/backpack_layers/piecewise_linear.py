"""Rules of piecewise linear activations: their second derivative is zero.

For activations with an in-place version, the output replaces the input where it determines the
slope. The other rules need the input, and raise an error if it was overwritten.
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

from backpack_core.errors import OverwrittenInputError
from backpack_core.record.view import View
from backpack_layers.fused import FusedRule
from backpack_products.elementwise import ElementwiseRule
from backpack_products.parametric import ParametricRule
from backpack_products.some_samples import saved_in
from backpack_products.values import any_of


class ReLURule(FusedRule):
    """``max(x, 0)``."""

    module_types = (ReLU,)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """One where the output is positive."""
        return view.output.sign()

    def fused(self, mat: Tensor, output: Tensor) -> Tensor:
        """``mat * φ'(x)``."""
        product: Tensor = torch.ops.aten.threshold_backward(mat, output, 0)
        return product


class HardtanhRule(ElementwiseRule):
    """``x`` clamped to an interval, ``[0, 6]`` for ``ReLU6``."""

    module_types = (Hardtanh, ReLU6)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """One strictly inside the interval, as input and output both show; one at NaN."""
        module = cast(Hardtanh, view.module)
        x = _either(view)
        return (~((x <= module.min_val) | (x >= module.max_val))).to(x.dtype)


class LeakyReLURule(ElementwiseRule):
    """``x`` where it is positive, ``a x`` elsewhere."""

    module_types = (LeakyReLU,)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """Input and output have the same sign, because torch refuses a negative slope in place."""
        return _slopes(_either(view), cast(LeakyReLU, view.module).negative_slope)


class RReLURule(ElementwiseRule):
    """A leaky ReLU whose slopes are drawn at random in train mode."""

    module_types = (RReLU,)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """In train mode, the random slope is what autograd saved, or output over input."""
        module = cast(RReLU, view.module)
        if not view.training:
            return _slopes(_either(view), (module.lower + module.upper) / 2)
        saved = saved_in(view, "noise")
        if saved is not None:
            return saved.to(view.dtype)
        x = view.input
        if any_of(x == 0):  # this look waits for an accelerator
            raise OverwrittenInputError(
                f"{view.path} drew random slopes that are not stored, and its output does not "
                "show them where its input is zero. Call eval() on the module."
            )
        return torch.where(x > 0, 1.0, view.output / x)


class ThresholdRule(ElementwiseRule):
    """``x`` above a threshold, a constant elsewhere."""

    module_types = (Threshold,)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """From the output, if the constant does not exceed the threshold; else from the input."""
        module = cast(Threshold, view.module)
        x = _either(view) if module.value <= module.threshold else view.input
        return (~(x <= module.threshold)).to(x.dtype)  # one at NaN


class ShrinkRule(ElementwiseRule):
    """``Softshrink`` and ``Hardshrink``: zero near zero."""

    module_types = (Softshrink, Hardshrink)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """One outside ``[-λ, λ]``."""
        x = view.input
        return (~(x.abs() <= cast(Softshrink, view.module).lambd)).to(x.dtype)  # one at NaN


class HardsigmoidRule(ElementwiseRule):
    """``x / 6 + 1 / 2`` clamped to ``[0, 1]``."""

    module_types = (Hardsigmoid,)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """``1 / 6`` where nothing is clamped."""
        x = view.input
        return (x.abs() < 3).to(x.dtype) / 6


class PReLURule(ElementwiseRule, ParametricRule):
    """A leaky ReLU whose slope is learned, one for all channels or one for each."""

    module_types = (PReLU,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """One where the input is positive, the slope elsewhere."""
        x = view.input
        return torch.where(x > 0, 1.0, self._per_channel(view, view.parameter("weight")))

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        product = mat * view.input.clamp(max=0)
        shape = view.parameter(name).shape
        if shape.numel() == 1:
            return product.reshape(*mat.shape[:2], mat.shape[2:].numel()).sum(2, keepdim=True)
        return product.reshape(*mat.shape[:3], mat.shape[3:].numel()).sum(3)

    def _per_channel(self, view: View, values: Tensor) -> Tensor:
        """``[..., C]`` (or one value for all) to where it multiplies ``[..., N, C, *]``."""
        dims = len(view.input_shape)
        if dims == 1:
            return values.reshape(*values.shape[:-1], -1)
        return values.reshape(*values.shape[:-1], 1, -1, *[1] * (dims - 2))


def _either(view: View) -> Tensor:
    """The input, or the output if the input was overwritten, for formulas that hold with both."""
    return view.output if cast(Any, view.module).inplace else view.input


def _slopes(x: Tensor, negative: float) -> Tensor:
    return torch.where(x > 0, 1.0, x.new_full((), negative))
