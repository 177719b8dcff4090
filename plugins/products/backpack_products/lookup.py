"""Products of tables whose rows are looked up, ``Σ_k e_{row[n, k]} ⊗ out[v, n, k]``.

An embedding table is large, and each sample reads only a few rows. Operations touch only those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack_products.factors import FactorProduct
from backpack_products.operations import batch_sum, square_sum, weighted_sum
from backpack_products.product import misfit


class LookupProduct(FactorProduct):
    """The product of a table ``[num, dim]``: ``Σ_k e_{row[n, k]} ⊗ out[v, n, k]``.

    Attributes:
        out: Columns at each look-up. Shape ``[V, N, K, dim]``.
        row: Which row each look-up read. Shape ``[N, K]``.
    """

    def __init__(
        self, out: Tensor, row: Tensor, shape: torch.Size, is_own: Tensor | None = None
    ) -> None:
        """Store the factors."""
        if out.dim() != 4 or row.shape != out.shape[1:3]:
            raise misfit(self, "[V, N, K, dim] and [N, K]", out, row)
        super().__init__(len(out), out.shape[1], shape, out)
        self.out, self.row, self.is_own = out, row, is_own

    @property
    def other(self) -> Tensor:
        """The row that each look-up read."""
        return self.row

    def with_factors(self, out: Tensor, other: Tensor, is_own: Tensor | None) -> LookupProduct:
        """A product of the same table with other factors."""
        return LookupProduct(out, other, self.shape, is_own)

    def part(self, columns: slice, samples: slice) -> Tensor:
        """``M`` of some columns and samples: zeros, with the columns added at the rows read."""
        out, row = self.out[columns, samples], self.row[samples]
        (num, dim), (count, samples_) = self.shape, out.shape[:2]
        start = torch.arange(samples_, device=row.device).unsqueeze(1) * num
        where = (start + row).flatten()
        flat = scattered(out.flatten(1, 2), where, 1, (count, samples_ * num, dim))
        return flat.reshape(count, samples_, num, dim)

    def segments(self) -> tuple[Tensor, Tensor]:
        """The nonzero rows of each sample's ``M``: look-ups of the same row are summed.

        The result has room for as many rows as look-ups; unused ones are zero. The number of
        different rows is not asked for, since the host would have to wait for the device.

        Returns:
            The values of the rows, ``[V, N, K, dim]``, and their numbers, ``[N, K]``.
        """
        if "segments" not in self.results:
            row, order = self.row.sort(1)
            index = torch.arange(row.numel(), device=row.device).view(row.shape)
            first = torch.where(row[:, 1:] != row[:, :-1], index[:, 1:], 0)  # start of equal rows
            first = torch.cat([index[:, :1], first], 1).cummax(1)[0]
            where = torch.empty_like(order).scatter_(1, order, first).flatten()
            shape = (self.columns, len(where), self.shape[1])
            sums = scattered(self.out.flatten(1, 2), where, 1, shape)
            self.results["segments"] = sums.view(self.out.shape), row
        segments: tuple[Tensor, Tensor] = self.results["segments"]
        return segments


@square_sum.register
def square_sum_lookup(product: LookupProduct) -> Tensor:
    """Square only the rows that are not zero."""
    sums, row = product.segments()
    squares = sums[0].square() if len(sums) == 1 else sums.square().sum(0)
    return scattered(squares.flatten(0, 1), row.flatten(), 0, product.shape)


@batch_sum.register
def batch_sum_lookup(product: LookupProduct) -> Tensor:
    """Sum only the rows that are not zero."""
    shape = (product.columns, *product.shape)
    return scattered(product.out.flatten(1, 2), product.row.flatten(), 1, shape)


@weighted_sum.register
def weighted_sum_lookup(product: LookupProduct, weights: Tensor) -> Tensor:
    """Weight and sum only the rows that are not zero."""
    if len(weights) == product.columns == 1:
        out = product.out * weights[0, :, :, None, None]
    else:
        out = torch.einsum("kvn,vnsd->knsd", weights, product.out)
    return batch_sum(LookupProduct(out, product.row, product.shape))


def scattered(values: Tensor, where: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape, with values added at indices along an axis."""
    zeros = values.new_zeros(shape)
    if torch.is_grad_enabled():
        return zeros.index_add(axis, where, values)
    if axis == len(values) == 1:  # adding whole rows is twice as fast
        zeros[0].index_add_(0, where, values[0])
        return zeros
    return zeros.index_add_(axis, where, values)
