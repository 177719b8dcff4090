"""Rules of curved elementwise activations: formulas of the first and second derivative.

For activations with an in-place version, formulas use the output where possible. The others need
the input, and raise an error if it was overwritten.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import (
    CELU,
    ELU,
    GELU,
    SELU,
    Hardswish,
    LogSigmoid,
    Mish,
    Sigmoid,
    SiLU,
    Softplus,
    Softsign,
    Tanh,
    Tanhshrink,
)
from torch.nn.functional import softplus

from backpack_core.record.view import View
from backpack_layers.fused import FusedRule
from backpack_products.elementwise import ElementwiseRule

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


class SigmoidRule(FusedRule):
    """``σ(x)``."""

    module_types = (Sigmoid,)

    def derivative(self, view: View) -> Tensor:
        """``y (1 - y)``."""
        y = view.output
        return y * (1 - y)

    def fused(self, mat: Tensor, output: Tensor) -> Tensor:
        """``mat * φ'(x)``."""
        product: Tensor = torch.ops.aten.sigmoid_backward(mat, output)
        return product

    def second_derivative(self, view: View) -> Tensor:
        """``y (1 - y) (1 - 2y)``."""
        y = view.output
        return y * (1 - y) * (1 - 2 * y)


class TanhRule(FusedRule):
    """``tanh(x)``."""

    module_types = (Tanh,)

    def derivative(self, view: View) -> Tensor:
        """``1 - y²``."""
        return 1 - view.output**2

    def fused(self, mat: Tensor, output: Tensor) -> Tensor:
        """``mat * φ'(x)``."""
        product: Tensor = torch.ops.aten.tanh_backward(mat, output)
        return product

    def second_derivative(self, view: View) -> Tensor:
        """``-2y (1 - y²)``."""
        y = view.output
        return -2 * y * (1 - y**2)


class ELURule(ElementwiseRule):
    """``s x`` for ``x > 0``, else ``s a (exp(c x) - 1)``: ``ELU``, ``CELU`` and ``SELU``."""

    module_types = (ELU, CELU, SELU)

    def derivative(self, view: View) -> Tensor:
        """``c s a exp(c x)`` where the input is not positive."""
        _, scale, rate = _elu_constants(view)
        return torch.where(self._positive(view), scale, rate * self._tail(view))

    def second_derivative(self, view: View) -> Tensor:
        """``c² s a exp(c x)`` where the input is not positive."""
        _, _, rate = _elu_constants(view)
        return torch.where(self._positive(view), 0.0, rate**2 * self._tail(view))

    def _positive(self, view: View) -> Tensor:
        # With a negative alpha, ELU is positive on both sides, and torch refuses it in place.
        return (view.output if _is_in_place(view) else view.input) > 0

    def _tail(self, view: View) -> Tensor:
        """``s a exp(c x)``: from the output only if the input is gone, since the sum cancels."""
        alpha, scale, rate = _elu_constants(view)
        if _is_in_place(view):
            return view.output + scale * alpha
        return scale * alpha * torch.exp(rate * view.input.clamp(max=0))


class GELURule(ElementwiseRule):
    """``x Φ(x)``, exact or by the tanh approximation."""

    module_types = (GELU,)

    def derivative(self, view: View) -> Tensor:
        """``Φ + x Φ'``."""
        x = view.input
        if cast(GELU, view.module).approximate == "none":
            return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * _normal_density(x)
        t, du = torch.tanh(_gelu_argument(x)), _gelu_argument_slope(x)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * du

    def second_derivative(self, view: View) -> Tensor:
        """``2Φ' + x Φ''``."""
        x = view.input
        if cast(GELU, view.module).approximate == "none":
            return _normal_density(x) * (2 - x**2)
        t, du = torch.tanh(_gelu_argument(x)), _gelu_argument_slope(x)
        ddu = 6 * SQRT_2_OVER_PI * GELU_CUBIC * x
        return (1 - t**2) * (du + 0.5 * x * ddu - x * t * du**2)


class SiLURule(ElementwiseRule):
    """``x σ(x)``."""

    module_types = (SiLU,)

    def derivative(self, view: View) -> Tensor:
        """``σ + x σ (1 - σ)``."""
        x = view.input
        s = x.sigmoid()
        return s * (1 + x * (1 - s))

    def second_derivative(self, view: View) -> Tensor:
        """``2σ' + x σ''``."""
        x = view.input
        s = x.sigmoid()
        return s * (1 - s) * (2 + x * (1 - 2 * s))


class MishRule(ElementwiseRule):
    """``x tanh(log(1 + exp(x)))``."""

    module_types = (Mish,)

    def derivative(self, view: View) -> Tensor:
        """``t + x (1 - t²) σ`` with ``t`` the tanh."""
        x = view.input
        t = softplus(x).tanh()
        return t + x * (1 - t**2) * x.sigmoid()

    def second_derivative(self, view: View) -> Tensor:
        """``(1 - t²) σ (2 + x (1 - σ - 2 t σ))``."""
        x = view.input
        t, s = softplus(x).tanh(), x.sigmoid()
        return (1 - t**2) * s * (2 + x * (1 - s - 2 * t * s))


class SoftplusRule(ElementwiseRule):
    """``log(1 + exp(βx)) / β``, replaced by ``x`` beyond a threshold."""

    module_types = (Softplus,)

    def derivative(self, view: View) -> Tensor:
        """``σ(βx)``."""
        z, linear = self._argument(view)
        return torch.where(linear, 1.0, z.sigmoid())

    def second_derivative(self, view: View) -> Tensor:
        """``β σ (1 - σ)``."""
        z, linear = self._argument(view)
        s = z.sigmoid()
        return torch.where(linear, 0.0, cast(Softplus, view.module).beta * s * (1 - s))

    def _argument(self, view: View) -> tuple[Tensor, Tensor]:
        module = cast(Softplus, view.module)
        z = module.beta * view.input
        return z, z > module.threshold


class SoftsignRule(ElementwiseRule):
    """``x / (1 + |x|)``."""

    module_types = (Softsign,)

    def derivative(self, view: View) -> Tensor:
        """``(1 + |x|)⁻²``."""
        return (1 + view.input.abs()) ** -2

    def second_derivative(self, view: View) -> Tensor:
        """``-2 sign(x) (1 + |x|)⁻³``."""
        x = view.input
        return -2 * x.sign() * (1 + x.abs()) ** -3


class TanhshrinkRule(ElementwiseRule):
    """``x - tanh(x)``."""

    module_types = (Tanhshrink,)

    def derivative(self, view: View) -> Tensor:
        """``tanh²``."""
        return view.input.tanh() ** 2

    def second_derivative(self, view: View) -> Tensor:
        """``2 tanh (1 - tanh²)``."""
        t = view.input.tanh()
        return 2 * t * (1 - t**2)


class LogSigmoidRule(ElementwiseRule):
    """``log σ(x)``."""

    module_types = (LogSigmoid,)

    def derivative(self, view: View) -> Tensor:
        """``σ(-x)``."""
        return (-view.input).sigmoid()

    def second_derivative(self, view: View) -> Tensor:
        """``-σ(x) σ(-x)``."""
        s = view.input.sigmoid()
        return -s * (1 - s)


class HardswishRule(ElementwiseRule):
    """``x`` times ``Hardsigmoid``."""

    module_types = (Hardswish,)

    def derivative(self, view: View) -> Tensor:
        """``x / 3 + 1 / 2`` between -3 and 3, zero below, one above."""
        x = view.input  # at the kinks, versions of torch differ
        slope: Tensor = torch.ops.aten.hardswish_backward(torch.ones_like(x), x)
        return slope

    def second_derivative(self, view: View) -> Tensor:
        """``1 / 3`` between -3 and 3."""
        x = view.input
        return (x.abs() < 3).to(x.dtype) / 3


def _elu_constants(view: View) -> tuple[float, float, float]:
    """``(a, s, c)`` of ``s a (exp(c x) - 1)``."""
    module = view.module
    if isinstance(module, SELU):
        return SELU_ALPHA, SELU_SCALE, 1.0
    if isinstance(module, CELU):
        return module.alpha, 1.0, 1 / module.alpha
    return cast(ELU, module).alpha, 1.0, 1.0


def _is_in_place(view: View) -> bool:
    return cast(ELU, view.module).inplace


def _normal_density(x: Tensor) -> Tensor:
    return torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _gelu_argument(x: Tensor) -> Tensor:
    return SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3)


def _gelu_argument_slope(x: Tensor) -> Tensor:
    return SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x**2)
