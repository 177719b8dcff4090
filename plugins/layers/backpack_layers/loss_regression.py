"""Rules for losses on real-valued targets. All are sums over elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers._loss import (
    ElementwiseLossRule,
    LinearLossRule,
    broadcast,
    setting,
)
from backpack_layers.arguments import arguments, tensor
from backpack_products.values import at_least_single


class MSELossRule(ElementwiseLossRule):
    """``ℓ = (x - y)²``: columns ``√2 e_i``, over ``√(N D)`` for a mean."""

    module_types = (nn.MSELoss,)
    likelihood = "Gaussian with mean x and variance 1/2"
    is_never_negative = True

    def curvature(self, view: View) -> Tensor:
        """``2``."""
        return torch.full_like(view.input, 2.0)

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """``2 (x - y)`` for ``y`` drawn from the likelihood."""
        return _normal(view, samples) * math.sqrt(2)


class L1LossRule(LinearLossRule):
    """``ℓ = |x - y|``: piecewise linear, so its curvature is zero almost everywhere."""

    module_types = (nn.L1Loss,)
    instead = "For curvature near the target use HuberLoss or MSELoss."


class HuberLossRule(ElementwiseLossRule):
    """``ℓ = (x - y)² / 2`` where ``|x - y| < δ``, linear beyond."""

    module_types = (nn.HuberLoss,)
    is_never_negative = True

    def curvature(self, view: View) -> Tensor:
        """``1`` near the target, ``0`` beyond."""
        delta: float = setting(view, "delta")
        return _within(view.input - self.target(view), delta)


class SmoothL1LossRule(ElementwiseLossRule):
    """``ℓ = (x - y)² / (2β)`` where ``|x - y| < β``, linear beyond; ``|x - y|`` for ``β = 0``."""

    module_types = (nn.SmoothL1Loss,)
    is_never_negative = True

    def curvature(self, view: View) -> Tensor:
        """``1/β`` near the target, ``0`` beyond."""
        beta: float = setting(view, "beta")
        if beta == 0:
            return torch.zeros_like(view.input)
        return _within(view.input - self.target(view), beta) / beta

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """Refused for ``β = 0``, as for ``L1Loss``."""
        if setting(view, "beta") == 0:
            raise UnsupportedError(
                f"A Monte-Carlo square root of the Hessian of {view.path} was asked for, but with "
                "beta=0 the Hessian is zero, so there is nothing to sample: use beta > 0."
            )
        return super().sampled_gradient(view, samples)


class PoissonNLLLossRule(ElementwiseLossRule):
    """``ℓ = eˣ - y x`` for ``log_input``, else ``ℓ = x - y log(x + ε)``.

    Stirling's term (``full``) does not depend on ``x``. Without ``log_input`` the Hessian is
    ``y / (x + ε)²``, not the Fisher information ``1/x``, so random signs are sampled.
    """

    module_types = (nn.PoissonNLLLoss,)
    likelihood = "Poisson with rate eˣ"

    def is_convex(self, view: View) -> bool:
        """Whatever the target is, if the input is the logarithm of the rate."""
        return bool(setting(view, "log_input"))

    def curvature(self, view: View) -> Tensor:
        """``eˣ`` or ``y / (x + ε)²``."""
        x = at_least_single(view.input)
        if setting(view, "log_input"):
            return x.exp()
        eps: float = setting(view, "eps")
        return self.target(view) / (x + eps) ** 2

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """``eˣ - k`` for ``k`` drawn from the likelihood."""
        if not setting(view, "log_input"):
            return super().sampled_gradient(view, samples)
        rate = at_least_single(view.input).exp()
        return rate - torch.poisson(rate.detach().expand(samples, *rate.shape))


class GaussianNLLLossRule(ElementwiseLossRule):
    """``ℓ = (log v + (x - y)² / v) / 2`` with ``v = max(var, ε)``, as a function of only ``x``.

    The Hessian in ``(x, v)`` is not positive semi-definite, so a variance that requires a gradient
    is refused.
    """

    module_types = (nn.GaussianNLLLoss,)
    likelihood = "Gaussian with mean x and variance max(var, ε)"

    def is_convex(self, view: View) -> bool:
        """For a positive ``ε``."""
        eps: float = setting(view, "eps")
        return eps > 0

    def check(self, view: View) -> None:
        """The variance must be constant."""
        variance = arguments(view.full)["var"]
        if isinstance(variance, Tensor) and variance.requires_grad:
            raise UnsupportedError(
                f"Curvature of {view.path} was asked for, but its variance requires a gradient, "
                "and the Hessian in mean and variance together is not positive semi-definite: "
                "detach the variance."
            )
        super().check(view)

    def curvature(self, view: View) -> Tensor:
        """``1/v``."""
        variance = arguments(view.full)["var"]
        if not isinstance(variance, Tensor):
            return torch.full_like(view.input, 1.0 / max(variance, setting(view, "eps")))
        variance = tensor(view.full, "var")
        if variance.shape == view.full.input_shape[:-1]:
            variance = variance.unsqueeze(-1)
        variance = at_least_single(broadcast(view, "variance", variance))
        return 1.0 / variance.clamp(min=setting(view, "eps"))

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """``(x - y) / v`` for ``y`` drawn from the likelihood."""
        return _normal(view, samples) * self.curvature(view).sqrt()


def _within(difference: Tensor, bound: float) -> Tensor:
    """``1`` where ``|difference| < bound``, else ``0``."""
    return (difference.abs() < bound).to(difference.dtype)


def _normal(view: View, samples: int) -> Tensor:
    """Standard normal numbers. Shape ``[samples, N, *in]``."""
    shape = (samples, *view.input_shape)
    return torch.randn(shape, dtype=view.dtype, device=view.input.device)
