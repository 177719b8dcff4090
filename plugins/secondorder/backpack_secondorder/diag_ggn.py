"""Diagonals of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backpack_core import LayerRule, ModuleCall, SecondOrderExtension, ops
from backpack_core.extension import FailMode, as_subsampling
from backpack_secondorder.propagators import LossSqrt


class _ExactExtension(SecondOrderExtension):
    """An extension of the exact square root of the loss Hessian."""

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all. The scale stays that of the
                whole batch.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
        """
        propagator = LossSqrt(subsampling=as_subsampling(subsampling))
        super().__init__(propagator, savefield, fail_mode)


class _SampledExtension(SecondOrderExtension):
    """An extension of the sampled square root of the loss Hessian."""

    def __init__(
        self,
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            mc_samples: Number of samples from the model's likelihood for each datum. Random numbers
                come from torch's default generator.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
        """
        propagator = LossSqrt(samples=mc_samples, subsampling=as_subsampling(subsampling))
        super().__init__(propagator, savefield, fail_mode)

    def get_num_mc_samples(self) -> int:
        """Number of Monte-Carlo samples."""
        assert isinstance(self.propagator, LossSqrt) and self.propagator.samples is not None
        return self.propagator.samples


class DiagGGNExact(_ExactExtension):
    """Diagonal of the generalised Gauss-Newton matrix, exact.

    Stored in ``diag_ggn_exact``, shape ``[*θ]``: ``diag(Σ_n J_nᵀ ∇²ℓ_n J_n)`` with the Jacobian
    ``J_n`` of the model's output. For a mean loss it carries the loss's ``1/N``.
    """

    savefield = "diag_ggn_exact"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """``Σ_v Σ_n M[v, n]²``."""
        return ops.square_sum(rule, call, name, mat)


class DiagGGNMC(_SampledExtension):
    """Diagonal of the generalised Gauss-Newton matrix, by Monte Carlo.

    Stored in ``diag_ggn_mc``, shape ``[*θ]``: as :class:`DiagGGNExact` in expectation, with the loss
    Hessian replaced by gradients for targets drawn from the model's likelihood. Costs ``mc_samples``
    columns instead of as many as the model has outputs.
    """

    savefield = "diag_ggn_mc"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """``Σ_v Σ_n M[v, n]²``."""
        return ops.square_sum(rule, call, name, mat)
