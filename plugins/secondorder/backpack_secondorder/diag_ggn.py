"""Diagonals of the generalised Gauss-Newton matrix ``G = Σ_n J_nᵀ ∇²ℓ_n J_n``."""

from __future__ import annotations

from torch import Tensor

from backpack_products import SampleProduct
from backpack_products.operations import per_sample_square_sum, square_sum
from backpack_secondorder.position_pairs import diagonal, sample_diagonals
from backpack_secondorder.square_root import ExactExtension, SampledExtension


class DiagGGNExact(ExactExtension):
    """Diagonal of the generalised Gauss-Newton matrix, exact.

    Stored in ``diag_ggn_exact``, shape ``[*θ]``: ``diag(Σ_n J_nᵀ ∇²ℓ_n J_n)`` with the Jacobian
    ``J_n`` of the model's output. For a mean loss it carries the loss's ``1/N``.
    Schraudolph (2002), and Dangel et al. (2020), BackPACK, eq. 19.
    """

    savefield = "diag_ggn_exact"
    degree = 1
    over_batches = "sum"
    sums_samples = True
    columns_add = True
    columns_mix = True
    needs = (square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        """``Σ_v Σ_n M[v, n]²``."""
        return diagonal(product)


class DiagGGNMC(SampledExtension):
    """Diagonal of the generalised Gauss-Newton matrix, by Monte Carlo.

    Stored in ``diag_ggn_mc``, shape ``[*θ]``: in expectation the same as :class:`DiagGGNExact`,
    with the loss Hessian replaced by gradients for targets drawn from the model's likelihood. It
    costs ``mc_samples`` columns instead of one for each output of the model.
    """

    savefield = "diag_ggn_mc"
    degree = 1
    over_batches = "sum"
    sums_samples = True
    columns_add = True
    columns_mix = True
    needs = (square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        """``Σ_v Σ_n M[v, n]²``."""
        return diagonal(product)


class BatchDiagGGNExact(ExactExtension):
    """Diagonal of each sample's generalised Gauss-Newton matrix, exact.

    Stored in ``diag_ggn_exact_batch``, shape ``[N, *θ]``: ``diag(J_nᵀ ∇²ℓ_n J_n)``, so that the sum
    over ``n`` is ``diag_ggn_exact``. For a mean loss every sample carries the loss's ``1/N``.
    """

    savefield = "diag_ggn_exact_batch"
    degree = 1
    over_batches = "concatenate"
    columns_add = True
    columns_mix = True
    per_sample = True
    needs = (per_sample_square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        """``Σ_v M[v, n]²``."""
        return sample_diagonals(product)


class BatchDiagGGNMC(SampledExtension):
    """Diagonal of each sample's generalised Gauss-Newton matrix, by Monte Carlo.

    Stored in ``diag_ggn_mc_batch``, shape ``[N, *θ]``: in expectation the same as
    :class:`BatchDiagGGNExact`. The sum over ``n`` is ``diag_ggn_mc`` of the same columns.
    """

    savefield = "diag_ggn_mc_batch"
    degree = 1
    over_batches = "concatenate"
    columns_add = True
    columns_mix = True
    per_sample = True
    needs = (per_sample_square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        """``Σ_v M[v, n]²``."""
        return sample_diagonals(product)
