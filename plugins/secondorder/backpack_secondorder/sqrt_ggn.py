"""Square roots of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from torch import Tensor

from backpack_products import SampleProduct, SecondOrderExtension
from backpack_products.merging import OverBatches, Part
from backpack_products.operations import dense
from backpack_secondorder.in_chunks import Rows, joined, rows_of, stored
from backpack_secondorder.square_root import ExactExtension, SampledExtension

# Values of batches are concatenated along the samples; the matrix sums the outer products of all.
COLUMNS = OverBatches({"": Part("concatenate", axis=1)})


class _Columns(SecondOrderExtension):
    """Stores the columns themselves."""

    columns_add = True
    per_sample = True
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor | Rows:
        """``M`` itself."""
        return rows_of(product)

    def as_stored(self, value: Tensor | Rows, parameter: Tensor) -> Tensor | Rows:
        """The columns in the dtype of results."""
        return stored(super().as_stored(value, parameter), self, parameter)

    def combine(self, first: Tensor | Rows, second: Tensor | Rows) -> Tensor | Rows:
        """Columns side by side."""
        return joined(first, second)


class SqrtGGNExact(_Columns, ExactExtension):
    """Square root of the generalised Gauss-Newton matrix, exact.

    Stored in ``sqrt_ggn_exact``, shape ``[V, N, *θ]`` with ``V`` outputs of the model, or one less
    for classes: for each sample ``J_nᵀ S_n`` with ``S_n S_nᵀ = ∇²ℓ_n``, so that the outer products,
    summed over ``V`` and ``N``, are the matrix. For a mean loss each entry carries the square root
    of the loss's ``1/N``.
    Columns are the same for every parameter: products between parameters give off-diagonal blocks.
    With a ``tolerance``, the number of columns depends on the batch.
    """

    savefield = "sqrt_ggn_exact"
    degree = 0.5
    over_batches = COLUMNS
    truncated_over_batches = COLUMNS.refused(
        "with a tolerance, batches have different numbers of columns: take tolerance=0."
    )


class SqrtGGNMC(_Columns, SampledExtension):
    """Square root of the generalised Gauss-Newton matrix, by Monte Carlo.

    Stored in ``sqrt_ggn_mc``, shape ``[mc_samples, N, *θ]``: like :class:`SqrtGGNExact`, with outer
    products that are the matrix in expectation.
    """

    savefield = "sqrt_ggn_mc"
    degree = 0.5
    over_batches = COLUMNS
