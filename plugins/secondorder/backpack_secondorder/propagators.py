"""Square roots of the loss Hessian, the columns of most second-order quantities."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import Extension, LayerRule, LossRule, View
from backpack_core.errors import UsageError, ZeroCurvatureWarning, warn_once
from backpack_products import ColumnPropagator, Columns, HessianLossRule
from backpack_products.loss import loss_factor, with_hessian
from backpack_products.values import at_least_single, is_flag
from backpack_secondorder.condensed import HeadRoot, at_head, condensed, split_at_head

_BEHIND_HEAD = "columns behind the head"


def as_count(name: str, value: Any, otherwise: str = "") -> int:
    """Check that an argument is a positive integer (of numpy or torch, too); return it as ``int``.

    Args:
        name: The name of the argument.
        value: The value.
        otherwise: What else is allowed, for the message.

    Raises:
        UsageError: The value is not a positive integer.
    """
    try:
        count = 0 if is_flag(value) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        got = f"{value!r:.80}."
        if isinstance(value, Module):
            got = "a model, but an extension takes none: the optimizers are in backpack_optimizers."
        raise UsageError(f"{name} must be a positive integer{otherwise}. Got {got}")
    return count


def warn_of_zero(rule: HessianLossRule, view: View) -> None:
    """Warn, once for each kind of loss, that a linear loss has curvature zero."""
    if rule.hessian_is_zero:
        message = (
            f"{view.path} is linear in its input, so its Hessian there is zero, and so is the "
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
        tolerance: The share of the trace that :func:`truncated` may leave out of the exact root.
    """

    needs_gradient: ClassVar[bool] = False

    samples: int | None = None
    subsampling: tuple[int, ...] | None = None
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        """Check the number of samples, and the tolerance.

        Raises:
            UsageError: The number is not positive, or the tolerance is not a share of an exact
                root.
        """
        if not isinstance(self.tolerance, int | float) or not 0 <= self.tolerance < 1:
            raise UsageError(
                "tolerance must be the share of the trace of the loss Hessian that may be left "
                f"out, at least 0 and below 1. Got {self.tolerance!r}."
            )
        if self.tolerance and self.samples is not None:
            raise UsageError(
                f"tolerance={self.tolerance!r} truncates the exact root of the loss Hessian, but "
                f"mc_samples={self.samples!r} asks for a sampled one: leave one of them out."
            )
        if self.samples is not None:  # in a plain int, so that equal propagators are equal
            object.__setattr__(self, "samples", as_count("mc_samples", self.samples))

    def start(self, rule: LossRule, view: View) -> Columns:
        """The exact or sampled square root of the loss Hessian."""
        rule = with_hessian(rule, view)
        factor = at_least_single(loss_factor(view).detach())
        scale = factor.sum() / max(1, factor.numel()) if factor.dim() else factor
        if self.samples is None:
            warn_of_zero(rule, view)
            root = truncated(rule.sqrt_hessian(view), self.tolerance)
            return Columns.start("loss", root, scale=scale)
        root = rule.sqrt_hessian_sampled(view, self.samples)
        return Columns.start("loss", root, scale=scale)

    def split_positions(self, quantity: Columns, owners: Tensor | None, samples: int) -> Columns:
        """Give several rows of one sample columns of their own, unless their targets were drawn.

        Draws of different rows are independent, so that the outer product of their sum has the
        right expectation: one column for each draw, however many rows a sample has.
        """
        is_drawn = self.samples is not None
        return quantity if is_drawn else super().split_positions(quantity, owners, samples)

    def serving(self, extensions: Sequence[Extension]) -> LossSqrt:
        """Columns may be replaced if there are several and all extensions of the group allow it."""
        may_mix = self.samples != 1 and all(extension.columns_mix for extension in extensions)
        return self.mixing() if may_mix else self

    def mixing(self) -> LossSqrt:
        """The :class:`MixedSqrt` with the same settings; a subclass may return another one."""
        if type(self) is not LossSqrt:
            return self
        return MixedSqrt(self.samples, self.subsampling, self.tolerance)


@dataclass(frozen=True)
class MixedSqrt(LossSqrt):
    """Columns that may be replaced by others with the same outer products; see ``condensed``."""

    def shed(
        self,
        rule: LayerRule | None,
        view: View,
        quantity: Columns,
        size: int,
        is_rooted: bool = False,
    ) -> tuple[Columns, Iterable[Columns]]:
        """Send chunks on at a loss; with a narrow head, only behind that head."""
        if rule is None:  # their roots are new, so no column has a part elsewhere
            return quantity.cut(size)
        # Rows of one sample share drawn columns: each row's would be replaced in its own way.
        is_shared = self.samples is not None and view.positions > 1
        if rule.is_loss and not is_rooted and not is_shared:
            marked = at_head(view, quantity)
            if marked is not None:
                return marked, ()
        return super().shed(rule, view, quantity, size, is_rooted)

    def propagate(self, rule: LayerRule, view: View, quantity: Columns) -> dict[int, Columns]:
        """The same as :class:`LossSqrt`, but columns at their head are left to :meth:`residual`."""
        if HeadRoot not in map(type, quantity.blocks):
            return super().propagate(rule, view, quantity)
        whole, rest = split_at_head(view, quantity)
        if whole.blocks:
            through = super().propagate(rule, view, whole)
            view.call_cache[_BEHIND_HEAD] = {
                i: condensed(columns) for i, columns in through.items()
            }
        return super().propagate(rule, view, rest) if rest.blocks else {}

    def residual(self, rule: LayerRule, view: View) -> dict[int, Columns]:
        """The fewer columns at the input of a head that replace those at its output."""
        condensed: dict[int, Columns] = view.call_cache.pop(_BEHIND_HEAD, {})
        return condensed


def truncated(root: Tensor, tolerance: float) -> Tensor:
    """The largest columns of a root: as many as the tolerance requires for every sample.

    ``H - S Sᵀ`` is positive semi-definite, with a trace of at most ``tolerance`` times that of
    ``H``, for the Hessian ``H`` of each sample's loss.

    Args:
        root: Shape ``[V, N, *in]``.
        tolerance: A share.

    Returns:
        Shape ``[v, N, *in]``; ``v ≥ 1`` is what the most demanding sample needs.
    """
    if not tolerance or not root.numel():
        return root
    norms = torch.linalg.vector_norm(root.detach().flatten(2), dim=2)
    ordered, order = at_least_single(norms).sort(0, descending=True)
    left = ordered.square().flip(0).cumsum(0).flip(0)  # the trace from each column on
    count = int((left > tolerance * left[:1]).sum(0).max())
    kept = order[: max(1, count)].reshape(-1, root.shape[1], *[1] * (root.dim() - 2))
    return root.gather(0, kept.expand(-1, -1, *root.shape[2:]))
