"""Rules for losses on real-valued targets. All are sums over elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from backpack_core.calls import ModuleCall
from backpack_core.errors import UnsupportedError
from backpack_layers._loss import (
    ElementwiseLossRule,
    LinearLossRule,
    setting,
    spread,
)
from backpack_layers.arguments import arguments, tensor


class MSELossRule(ElementwiseLossRule):
    """``ℓ = (x - y)²``: columns ``√2 e_i``, over ``√(N D)`` for a mean."""

    module_types = (nn.MSELoss,)
    likelihood = "Gaussian with mean x and variance 1/2"

    def curvature(self, call: ModuleCall) -> Tensor:
        """``2``."""
        return torch.full_like(call.input, 2.0)

    def sampled_gradient(self, call: ModuleCall, samples: int) -> Tensor:
        """``2 (x - y)`` for ``y`` drawn from the likelihood."""
        return _normal(call, samples) * math.sqrt(2)


class L1LossRule(LinearLossRule):
    """``ℓ = |x - y|``: piecewise linear, so its curvature is zero almost everywhere."""

    module_types = (nn.L1Loss,)
    instead = "For curvature near the target use HuberLoss or MSELoss."


class HuberLossRule(ElementwiseLossRule):
    """``ℓ = (x - y)² / 2`` where ``|x - y| < δ``, linear beyond."""

    module_types = (nn.HuberLoss,)

    def curvature(self, call: ModuleCall) -> Tensor:
        """``1`` near the target, ``0`` beyond."""
        delta: float = setting(call, "delta")
        return _within(call.input - self.target(call), delta)


class SmoothL1LossRule(ElementwiseLossRule):
    """``ℓ = (x - y)² / (2β)`` where ``|x - y| < β``, linear beyond; ``|x - y|`` for ``β = 0``."""

    module_types = (nn.SmoothL1Loss,)

    def curvature(self, call: ModuleCall) -> Tensor:
        """``1/β`` near the target, ``0`` beyond."""
        beta: float = setting(call, "beta")
        if beta == 0:
            return torch.zeros_like(call.input)
        return _within(call.input - self.target(call), beta) / beta

    def sampled_gradient(self, call: ModuleCall, samples: int) -> Tensor:
        """Refused for ``β = 0``, as for ``L1Loss``."""
        if setting(call, "beta") == 0:
            raise UnsupportedError(
                f"A Monte-Carlo square root of the Hessian of {call.path} was asked for, but with "
                "beta=0 the Hessian is zero, so there is nothing to sample: use beta > 0."
            )
        return super().sampled_gradient(call, samples)


class PoissonNLLLossRule(ElementwiseLossRule):
    """``ℓ = eˣ - y x`` for ``log_input``, else ``ℓ = x - y log(x + ε)``.

    Stirling's term (``full``) does not depend on ``x``. Without ``log_input`` the Hessian is
    ``y / (x + ε)²`` and not the Fisher information ``1/x``, so random signs are sampled.
    """

    module_types = (nn.PoissonNLLLoss,)
    likelihood = "Poisson with rate eˣ"

    def curvature(self, call: ModuleCall) -> Tensor:
        """``eˣ`` or ``y / (x + ε)²``."""
        if setting(call, "log_input"):
            return call.input.exp()
        eps: float = setting(call, "eps")
        return self.target(call) / (call.input + eps) ** 2

    def sampled_gradient(self, call: ModuleCall, samples: int) -> Tensor:
        """``eˣ - k`` for ``k`` drawn from the likelihood."""
        if not setting(call, "log_input"):
            return super().sampled_gradient(call, samples)
        rate = call.input.exp()
        return rate - torch.poisson(rate.detach().expand(samples, *rate.shape))


class GaussianNLLLossRule(ElementwiseLossRule):
    """``ℓ = (log v + (x - y)² / v) / 2`` with ``v = max(var, ε)``, as a function of ``x`` alone.

    The Hessian in ``(x, v)`` is not positive semi-definite, so a variance that requires a gradient
    is refused.
    """

    module_types = (nn.GaussianNLLLoss,)
    likelihood = "Gaussian with mean x and variance max(var, ε)"

    def check(self, call: ModuleCall) -> None:
        """The variance must be constant."""
        variance = arguments(call.full)["var"]
        if isinstance(variance, Tensor) and variance.requires_grad:
            raise UnsupportedError(
                f"Curvature of {call.path} was asked for, but its variance requires a gradient, "
                "and the Hessian in mean and variance together is not positive semi-definite: "
                "detach the variance."
            )
        super().check(call)

    def curvature(self, call: ModuleCall) -> Tensor:
        """``1/v``."""
        variance = arguments(call.full)["var"]
        if not isinstance(variance, Tensor):
            return torch.full_like(call.input, 1.0 / max(variance, setting(call, "eps")))
        variance = tensor(call.full, "var")
        if variance.shape == call.full.input_shape[:-1]:
            variance = variance.unsqueeze(-1)
        return 1.0 / spread(call, "variance", variance).clamp(min=setting(call, "eps"))

    def sampled_gradient(self, call: ModuleCall, samples: int) -> Tensor:
        """``(x - y) / v`` for ``y`` drawn from the likelihood."""
        return _normal(call, samples) * self.curvature(call).sqrt()


def _within(difference: Tensor, bound: float) -> Tensor:
    """``1`` where ``|difference| < bound``, else ``0``."""
    return (difference.abs() < bound).to(difference.dtype)


def _normal(call: ModuleCall, samples: int) -> Tensor:
    """Standard normal numbers. Shape ``[samples, N, *in]``."""
    shape = (samples, *call.input_shape)
    return torch.randn(shape, dtype=call.dtype, device=call.input.device)
