"""An activation with learned coefficients, and the rule that makes every extension work for it."""

from __future__ import annotations

import torch
from backpack_core import View
from backpack_products import ElementwiseRule, ParametricRule
from torch import Tensor, nn


class Rational(nn.Module):
    """``y = P(x) / Q(x)`` with ``P = Σ_k a_k xᵏ`` and ``Q = 1 + |b_1 x + b_2 x²|``.

    A Padé activation unit in its safe form (Molina et al., 2020, arXiv:1907.06732, eq. 2). It
    starts near a leaky ReLU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numerator = nn.Parameter(torch.tensor([0.03, 0.6, 1.0, 0.4]))
        self.denominator = nn.Parameter(torch.tensor([0.1, 0.6]))

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise, for any shape."""
        p, q = _powers(input, 4) @ self.numerator, _powers(input, 3)[..., 1:] @ self.denominator
        return p / (1 + q.abs())


class RationalRule(ElementwiseRule, ParametricRule):
    """Derivatives of a quotient, in terms of ``y``: ``y' = (P' - y Q') / Q``."""

    module_types = (Rational,)
    params = ("numerator", "denominator")
    linear_in_params = ("numerator",)

    def derivative(self, view: View) -> Tensor:
        """``(P' - y Q') / Q``."""
        (_, p1, _), (q, q1, _) = _derivatives(view)
        return (p1 - view.output * q1) / q

    def second_derivative(self, view: View) -> Tensor:
        """``(P'' - 2 y' Q' - y Q'') / Q``."""
        (_, _, p2), (q, q1, q2) = _derivatives(view)
        return (p2 - 2 * self.derivative(view) * q1 - view.output * q2) / q

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        _, (q, _, _) = _derivatives(view)
        if name == "numerator":  # ∂y/∂a_k = xᵏ / Q
            factors = _powers(view.input, 4) / q.unsqueeze(-1)
        else:  # ∂y/∂b_k = -y sign(b_1 x + b_2 x²) xᵏ / Q
            powers = _powers(view.input, 3)[..., 1:]
            sign = (powers @ view.parameter(name)).sign()
            factors = powers * (-view.output * sign / q).unsqueeze(-1)
        return torch.einsum("vnd,ndk->vnk", mat.flatten(2), factors.flatten(1, -2))


def _powers(x: Tensor, count: int) -> Tensor:
    """``1, x, x², …`` on a new last axis."""
    return torch.stack([x**k for k in range(count)], -1)


def _derivatives(view: View) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """``P, P', P''`` and ``Q, Q', Q''``."""
    a, b, x = view.parameter("numerator"), view.parameter("denominator"), view.input
    p = _powers(x, 4) @ a
    p1 = a[1] + 2 * a[2] * x + 3 * a[3] * x**2
    p2 = 2 * a[2] + 6 * a[3] * x
    inner = b[0] * x + b[1] * x**2
    sign = inner.sign()
    return (p, p1, p2), (1 + inner.abs(), sign * (b[0] + 2 * b[1] * x), sign * 2 * b[1])
