"""Base classes for extensions of the loss Hessian's square root, with their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from backpack_core.contract.extension import FailMode
from backpack_products import SecondOrderExtension
from backpack_products.extensions import as_subsampling
from backpack_products.merging import OverBatches
from backpack_secondorder.propagators import LossSqrt, as_count


class ExactExtension(SecondOrderExtension):
    """An extension of the exact square root of the loss Hessian.

    It has a column for every output of the model, and one less for classes (``CrossEntropyLoss``).
    With a ``tolerance``, it has just as many as make the trace of ``H - S Sᵀ`` at most
    ``tolerance · tr H`` for every sample's ``H = ∇²ℓ_n``. The difference is positive semi-definite.
    The bound holds for the Hessian of the loss. The Gauss-Newton matrix is never overestimated; it
    lacks ``Jᵀ (H - S Sᵀ) J``, which depends on the Jacobians.

    Class attributes:
        truncated_over_batches: How values of batches combine with a tolerance; ``None`` if it makes
            no difference.
    """

    truncated_over_batches: ClassVar[OverBatches | None] = None

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        chunk_size: int | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all. The scale stays that of the
                whole batch.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
            chunk_size: How many columns to carry at once; default: as many as fit into the memory
                budget. Extensions that share the columns go by the smallest number.
            tolerance: Share of the trace of the loss Hessian that may be left out to save columns;
                see the class.
        """
        propagator = LossSqrt(subsampling=as_subsampling(subsampling), tolerance=tolerance)
        super().__init__(propagator, savefield, fail_mode)
        self.chunk_size = as_chunk_size(chunk_size)
        if tolerance and self.truncated_over_batches is not None:
            self.over_batches = self.truncated_over_batches


class SampledExtension(SecondOrderExtension):
    """An extension of the sampled square root of the loss Hessian: a column for every sample."""

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
        assert isinstance(self.propagator, LossSqrt)
        assert self.propagator.samples is not None
        return self.propagator.samples


def as_chunk_size(size: int | None) -> int | None:
    """Check that the argument is ``None`` or a positive integer (:func:`as_count`); return it."""
    return None if size is None else as_count("chunk_size", size, " or None")
