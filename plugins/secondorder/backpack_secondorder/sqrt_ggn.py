"""Square roots of the generalised Gauss-Newton matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products import SampleProduct
from backpack_products.merging import OverBatches, Part
from backpack_products.operations import dense
from backpack_secondorder.square_root import ExactExtension, SampledExtension

# Values of batches are concatenated along the samples; the matrix sums the outer products of all.
COLUMNS = OverBatches({"": Part("concatenate", axis=1)})


class SqrtGGNExact(ExactExtension):
    """Square root of the generalised Gauss-Newton matrix, exact.

    Stored in ``sqrt_ggn_exact``, shape ``[V, N, *θ]`` with ``V`` outputs of the model, or one less
    for classes: for each sample ``J_nᵀ S_n`` with ``S_n S_nᵀ = ∇²ℓ_n``, so that the outer products,
    summed over ``V`` and ``N``, are the matrix. For a mean loss each entry carries the square root
    of the loss's ``1/N``.
    Columns are the same for every parameter: products between parameters give off-diagonal blocks.
    With a ``tolerance``, how many there are depends on the batch.
    """

    savefield = "sqrt_ggn_exact"
    degree = 0.5
    over_batches = COLUMNS
    truncated_over_batches = COLUMNS.refused(
        "with a tolerance, batches differ in their number of columns: take tolerance=0."
    )
    columns_add = True
    per_sample = True
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        """``M`` itself."""
        return dense(product)

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Columns side by side."""
        return torch.cat([first, second])


class SqrtGGNMC(SampledExtension):
    """Square root of the generalised Gauss-Newton matrix, by Monte Carlo.

    Stored in ``sqrt_ggn_mc``, shape ``[mc_samples, N, *θ]``: as :class:`SqrtGGNExact`, with outer
    products that are the matrix in expectation.
    """

    savefield = "sqrt_ggn_mc"
    degree = 0.5
    over_batches = COLUMNS
    columns_add = True
    per_sample = True
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        """``M`` itself."""
        return dense(product)

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Columns side by side."""
        return torch.cat([first, second])
