"""Rules of elementwise activations: one row of formulas for each function.

Where torch can work in place, a formula in terms of the output is used as far as one exists. The
others need the input, and say so when it was overwritten.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import (
    CELU,
    ELU,
    GELU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    RReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
)

from backpack_core.calls import ModuleCall
from backpack_core.errors import OverwrittenInputError
from backpack_core.rules import ElementwiseRule, ParametricRule

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


class ReLURule(ElementwiseRule):
    """``max(x, 0)``."""

    module_types = (ReLU,)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """One where the output is positive."""
        return call.output.sign()


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
        if not module.training:
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


class SigmoidRule(ElementwiseRule):
    """``σ(x)``."""

    module_types = (Sigmoid,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``y (1 - y)``."""
        y = call.output
        return y * (1 - y)

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``y (1 - y) (1 - 2y)``."""
        y = call.output
        return y * (1 - y) * (1 - 2 * y)


class TanhRule(ElementwiseRule):
    """``tanh(x)``."""

    module_types = (Tanh,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``1 - y²``."""
        return 1 - call.output**2

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``-2y (1 - y²)``."""
        y = call.output
        return -2 * y * (1 - y**2)


class ELURule(ElementwiseRule):
    """``s x`` where it is positive, ``s a (exp(c x) - 1)`` elsewhere, for three families."""

    module_types = (ELU, CELU, SELU)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``c (y + s a)`` where the input is not positive."""
        _, scale, rate = _elu_constants(call)
        return torch.where(self._positive(call), scale, rate * self._tail(call))

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``c² (y + s a)`` where the input is not positive."""
        _, _, rate = _elu_constants(call)
        return torch.where(self._positive(call), 0.0, rate**2 * self._tail(call))

    def _positive(self, call: ModuleCall) -> Tensor:
        alpha, _, rate = _elu_constants(call)
        # With a negative alpha, ELU is positive on both sides, and torch refuses it in place.
        return (call.output if alpha * rate >= 0 else call.input) > 0

    def _tail(self, call: ModuleCall) -> Tensor:
        alpha, scale, _ = _elu_constants(call)
        return call.output + scale * alpha


class GELURule(ElementwiseRule):
    """``x Φ(x)``, exact or by the tanh approximation."""

    module_types = (GELU,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``Φ + x Φ'``."""
        x = call.input
        if cast(GELU, call.module).approximate == "none":
            return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * _normal_density(x)
        t, du = torch.tanh(_gelu_argument(x)), _gelu_argument_slope(x)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * du

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``2Φ' + x Φ''``."""
        x = call.input
        if cast(GELU, call.module).approximate == "none":
            return _normal_density(x) * (2 - x**2)
        t, du = torch.tanh(_gelu_argument(x)), _gelu_argument_slope(x)
        ddu = 6 * SQRT_2_OVER_PI * GELU_CUBIC * x
        return (1 - t**2) * (du + 0.5 * x * ddu - x * t * du**2)


class SiLURule(ElementwiseRule):
    """``x σ(x)``."""

    module_types = (SiLU,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``σ + x σ (1 - σ)``."""
        x = call.input
        s = x.sigmoid()
        return s * (1 + x * (1 - s))

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``2σ' + x σ''``."""
        x = call.input
        s = x.sigmoid()
        return s * (1 - s) * (2 + x * (1 - 2 * s))


class MishRule(ElementwiseRule):
    """``x tanh(log(1 + exp(x)))``."""

    module_types = (Mish,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``t + x (1 - t²) σ`` with ``t`` the tanh."""
        x = call.input
        t = torch.nn.functional.softplus(x).tanh()
        return t + x * (1 - t**2) * x.sigmoid()

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``(1 - t²) σ (2 + x (1 - σ - 2 t σ))``."""
        x = call.input
        t, s = torch.nn.functional.softplus(x).tanh(), x.sigmoid()
        return (1 - t**2) * s * (2 + x * (1 - s - 2 * t * s))


class SoftplusRule(ElementwiseRule):
    """``log(1 + exp(βx)) / β``, replaced by ``x`` beyond a threshold."""

    module_types = (Softplus,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``σ(βx)``."""
        z, linear = self._argument(call)
        return torch.where(linear, 1.0, z.sigmoid())

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``β σ (1 - σ)``."""
        z, linear = self._argument(call)
        s = z.sigmoid()
        return torch.where(linear, 0.0, cast(Softplus, call.module).beta * s * (1 - s))

    def _argument(self, call: ModuleCall) -> tuple[Tensor, Tensor]:
        module = cast(Softplus, call.module)
        z = module.beta * call.input
        return z, z > module.threshold


class SoftsignRule(ElementwiseRule):
    """``x / (1 + |x|)``."""

    module_types = (Softsign,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``(1 + |x|)⁻²``."""
        return (1 + call.input.abs()) ** -2

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``-2 sign(x) (1 + |x|)⁻³``."""
        x = call.input
        return -2 * x.sign() * (1 + x.abs()) ** -3


class TanhshrinkRule(ElementwiseRule):
    """``x - tanh(x)``."""

    module_types = (Tanhshrink,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``tanh²``."""
        return call.input.tanh() ** 2

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``2 tanh (1 - tanh²)``."""
        t = call.input.tanh()
        return 2 * t * (1 - t**2)


class LogSigmoidRule(ElementwiseRule):
    """``log σ(x)``."""

    module_types = (LogSigmoid,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``σ(-x)``."""
        return (-call.input).sigmoid()

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``-σ(x) σ(-x)``."""
        s = call.input.sigmoid()
        return -s * (1 - s)


class HardsigmoidRule(ElementwiseRule):
    """``x / 6 + 1 / 2`` cut to ``[0, 1]``."""

    module_types = (Hardsigmoid,)
    hessian_is_zero = True

    def derivative(self, call: ModuleCall) -> Tensor:
        """``1 / 6`` where nothing is cut."""
        x = call.input
        return (x.abs() < 3).to(x.dtype) / 6


class HardswishRule(ElementwiseRule):
    """``x`` times ``Hardsigmoid``."""

    module_types = (Hardswish,)

    def derivative(self, call: ModuleCall) -> Tensor:
        """``x / 3 + 1 / 2`` between -3 and 3, zero below, one above."""
        x = call.input
        return torch.where(x.abs() < 3, x / 3 + 0.5, (x > 0).to(x.dtype))

    def second_derivative(self, call: ModuleCall) -> Tensor:
        """``1 / 3`` between -3 and 3."""
        x = call.input
        return (x.abs() < 3).to(x.dtype) / 3


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


def _elu_constants(call: ModuleCall) -> tuple[float, float, float]:
    """``(a, s, c)`` of ``s a (exp(c x) - 1)``."""
    module = call.module
    if isinstance(module, SELU):
        return SELU_ALPHA, SELU_SCALE, 1.0
    if isinstance(module, CELU):
        return module.alpha, 1.0, 1 / module.alpha
    return cast(ELU, module).alpha, 1.0, 1.0


def _normal_density(x: Tensor) -> Tensor:
    return torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _gelu_argument(x: Tensor) -> Tensor:
    return SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3)


def _gelu_argument_slope(x: Tensor) -> Tensor:
    return SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x**2)
