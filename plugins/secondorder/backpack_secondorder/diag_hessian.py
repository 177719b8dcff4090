"""Diagonals of the Hessian."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backpack_core.contract.extension import FailMode
from backpack_products import SecondOrderExtension
from backpack_products.extensions import as_subsampling
from backpack_products.operations import per_sample_square_sum, square_sum
from backpack_secondorder.hessian_reading import HessianReading
from backpack_secondorder.signed_sqrt import SignedSqrt
from backpack_secondorder.square_root import as_chunk_size


class HessianExtension(SecondOrderExtension):
    """The base of extensions of the Hessian at layers that are linear in their parameters."""

    columns_add = True

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        chunk_size: int | None = None,
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all. The scale stays that of the
                whole batch.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
                With ``"warning"`` and ``"silent"``, parameters that enter nonlinearly have no
                value, but the others do.
            chunk_size: How many columns to carry at once; default: by the memory budget.
        """
        leaves_out = fail_mode in ("warning", "silent")
        propagator = SignedSqrt(as_subsampling(subsampling), leaves_out)
        super().__init__(propagator, savefield, fail_mode)
        self.chunk_size = as_chunk_size(chunk_size)


class DiagHessian(HessianExtension):
    """Diagonal of the Hessian, exact.

    Stored in ``diag_h``, shape ``[*θ]``: ``∂²ℓ/∂θ_i²``, entry by entry, with the scale of the loss
    (``1/N`` for a mean). Every nonlinear module adds as many columns as it has inputs, and every
    nonlinear operation between modules up to twice as many; they go through the rest of the net in
    chunks. Nonlinear modules need a rule with second derivatives. Operations need what autograd
    needs to differentiate twice, which fused attention lacks. Parameters must enter linearly, as in
    affine and normalisation layers or in a product that a function computes; a parameter with
    several uses on one path does not. The pass refuses terms in ``backpack(..., beside=[...])``,
    because their curvature would be missing. Dangel et al. (2020), BackPACK, appendix A.3.
    """

    savefield = "diag_h"
    is_of_everything = True
    degree = 1
    over_batches = "sum"
    sums_samples = True
    needs = (square_sum,)

    def read(self, product: HessianReading) -> Tensor:
        """``Σ_n diag(J_θᵀ H_n J_θ)``."""
        return product.diagonal()


class BatchDiagHessian(HessianExtension):
    """Diagonal of each sample's Hessian, exact.

    Stored in ``diag_h_batch``, shape ``[N, *θ]``: like :class:`DiagHessian`, for the loss of each
    sample (with its ``1/N`` for a mean), so that the sum over ``n`` is ``diag_h``.
    """

    savefield = "diag_h_batch"
    degree = 1
    over_batches = "concatenate"
    needs = (per_sample_square_sum,)
    per_sample = True

    def read(self, product: HessianReading) -> Tensor:
        """``diag(J_θᵀ H_n J_θ)``."""
        return product.diagonal(per_sample=True)
