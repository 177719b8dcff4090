"""Square roots of the loss Hessian: what most second-order quantities send backwards."""

from __future__ import annotations

from dataclasses import dataclass

from backpack_core import ColumnPropagator, Columns, LossRule, View
from backpack_core.errors import UsageError, ZeroCurvatureWarning, warn_once
from backpack_core.values import at_least_single


def warn_of_zero(rule: LossRule, view: View) -> None:
    """Say, once for each kind of loss, that the matrix is zero where the loss is linear."""
    if rule.hessian_is_zero:
        message = (
            f"{view.path} is linear in its input, so its Hessian there is zero, and with it the "
            f"whole generalised Gauss-Newton matrix. {rule.instead}"
        )
        key = (ZeroCurvatureWarning, type(view.call.module))
        warn_once(key, message.rstrip(), ZeroCurvatureWarning)


@dataclass(frozen=True)
class LossSqrt(ColumnPropagator):
    """Columns ``S`` with ``Σ_v S_v S_vᵀ = ∇²ℓ``, pushed by transposed Jacobians.

    At a tensor ``z`` the columns are ``J_zᵀ S``, so that their outer products give the generalised
    Gauss-Newton matrix of ``z`` (Schraudolph 2002; Dangel et al. 2020, BackPACK, eq. 18).

    Attributes:
        samples: Number of Monte-Carlo samples; ``None`` for the exact root.
        subsampling: The samples of the batch that take part; ``None`` for all.
    """

    samples: int | None = None
    subsampling: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the number of samples.

        Raises:
            UsageError: It is not positive.
        """
        if self.samples is not None and (
            not isinstance(self.samples, int) or isinstance(self.samples, bool) or self.samples < 1
        ):
            raise UsageError(f"mc_samples must be a positive integer. Got {self.samples!r}.")

    def start(self, rule: LossRule, view: View) -> Columns:
        """The exact or sampled square root of the loss Hessian."""
        factor = at_least_single(rule.factor(view).detach())
        scale = factor.sum() / max(1, factor.numel())
        if self.samples is None:
            warn_of_zero(rule, view)
            return Columns.start("loss", rule.sqrt_hessian(view), scale=scale)
        root = rule.sqrt_hessian_sampled(view, self.samples)
        return Columns.start("loss", root, scale=scale)
