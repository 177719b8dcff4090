"""Products of samples that have several rows each, from the products of rows.

Examples are users with several records, or molecules with several atoms. A rule gives the product
of single rows. Operations that are linear in the rows use it directly. For the others, the rows of
a sample become positions; samples with the same number of rows share one product in factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_products.affine import AffineProduct
from backpack_products.columns import Root
from backpack_products.contractions import slices
from backpack_products.factors import FactorProduct
from backpack_products.held import Versions, held_by
from backpack_products.operations import batch_sum, formed, weighted_sum
from backpack_products.product import SampleProduct
from backpack_products.rows import Rows
from backpack_products.tuning import CACHE, PADDED, piece_size


def gathered(product: FactorProduct, owned: Tensor) -> Any:
    """The product of samples in the same form, padded with zeros to the largest number of rows.

    Args:
        product: The product of rows, ``[V, R, *θ]``.
        owned: The mask of rows of each sample, ``[N, R]``.
    """
    counts = owned.sum(1)
    most = max(1, int(counts.max())) if len(counts) else 1
    rows = owned.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    is_there = owned.gather(1, rows)

    def of_samples(mat: Tensor, axis: int) -> Tensor:  # [*, R, S, ...] → [*, N, most · S, ...]
        gathered = mat.movedim(axis, 0)[rows]
        mask = is_there.reshape(*is_there.shape, *[1] * (gathered.dim() - 2))
        gathered = torch.where(mask, gathered, 0)
        return gathered.movedim((0, 1), (axis, axis + 1)).flatten(axis + 1, axis + 2)

    other = product.other
    inp = None if other is None else of_samples(other[slice(0, other.shape[0])], 0)
    is_own = is_there.repeat_interleave(product.out.shape[2], 1)
    return product.with_factors(of_samples(product.out, 1), inp, is_own)


class Share(NamedTuple):
    """The samples with the same number of rows.

    Attributes:
        samples: Their numbers.
        product: Their product, with rows as positions.
    """

    samples: Tensor
    product: AffineProduct


class OwnedAffine(AffineProduct):
    """An affine product summed over the rows of each sample: ``Σ_{r of n} M[v, r]``.

    Attributes:
        of_rows: The product of rows, ``[V, R, *θ]``.
        owned: The mask of rows of each sample, ``[N, R]``; no row belongs to two samples.
    """

    def __init__(self, of_rows: AffineProduct, owned: Tensor) -> None:
        """Store the product of rows; factors of samples are computed when they are needed."""
        columns, like = of_rows.columns, of_rows.like
        SampleProduct.__init__(self, columns, len(owned), of_rows.shape, like)
        self.of_rows, self.owned, self.arrange = of_rows, owned.to(like.device), of_rows.arrange
        self.roots = of_rows.roots

    @cached_property
    def owner(self) -> Tensor:
        """The sample of each row, ``[R]``; ``N`` for a row of no sample."""
        nobody = self.owned.new_ones(1, self.owned.shape[1])
        return torch.cat([self.owned, nobody]).int().argmax(0)

    @cached_property
    def _factors(self) -> AffineProduct:
        product: AffineProduct = gathered(self.of_rows, self.owned)
        return product

    @property
    def out(self) -> Tensor:  # type: ignore[override]
        """The columns of samples, ``[V, N, S, G, O]``, padded."""
        return self._factors.out

    @property
    def inp(self) -> Rows | None:  # type: ignore[override]
        """The inputs of samples, ``[N, S, G, I]``, padded."""
        return None if self.of_rows.inp is None else self._factors.inp

    @property
    def is_own(self) -> Tensor | None:  # type: ignore[override]
        """The mask of positions of each sample, ``[N, S]``."""
        return self._factors.is_own

    @property
    def sizes(self) -> tuple[int, ...]:
        """``(G, O, I)``, for a bias ``(G, O)``."""
        return self.of_rows.sizes

    def held(self) -> Versions:
        """The factors of the product of rows."""
        return held_by(self.of_rows)

    def lasting(self) -> SampleProduct:
        """The product with lasting factors of rows."""
        rows: Any = self.of_rows.lasting()
        return self if rows is self.of_rows else OwnedAffine(rows, self.owned).placed_as(self)

    def among(self, roots: Mapping[Root, int]) -> SampleProduct:
        """The product for more roots, with columns of zeros for the others."""
        self.of_rows.roots = self.roots  # propagators set the roots of this product
        rows: Any = self.of_rows.among(roots)
        return self if rows is self.of_rows else OwnedAffine(rows, self.owned)

    def plus(self, others: Sequence[SampleProduct]) -> tuple[SampleProduct, list[SampleProduct]]:
        """Add products of the same rows as products of rows, if all have that form."""
        alike = [
            other.of_rows
            for other in others
            if isinstance(other, OwnedAffine) and torch.equal(self.owned, other.owned)
        ]
        if not others or len(alike) < len(others):
            return super().plus(others)
        whole, rest = self.of_rows.plus(alike)
        if rest or not isinstance(whole, AffineProduct):
            return super().plus(others)
        return OwnedAffine(whole, self.owned), []

    def shares(self) -> Iterator[Share]:
        """Yields the samples that have rows, by their number of rows."""
        rows, counts = self.of_rows, self.owned.sum(1)
        inp = None if rows.inp is None else rows.inp[0 : rows.samples]
        for count in counts.unique().tolist():
            samples = (counts == count).nonzero().flatten()
            if count:
                its = self.owned[samples].nonzero()[:, 1]
                out = _of_rows(rows.out, 1, its).unflatten(1, (-1, count)).flatten(2, 3)
                its_inp = None
                if inp is not None:
                    its_inp = _of_rows(inp, 0, its).unflatten(0, (-1, count)).flatten(1, 2)
                yield Share(samples, AffineProduct(out, its_inp, rows.shape, rows.arrange))

    @property
    def is_small(self) -> bool:
        """Whether padded factors cost less than a kernel for each number of rows."""
        inp = self.of_rows.inp
        return isinstance(inp, Tensor) and self.of_rows.out.numel() + inp.numel() <= PADDED

    def part(self, columns: slice, samples: slice) -> Tensor:
        """``M`` of some columns and samples: padded, by shares, or as a sum of formed rows."""
        wanted = range(self.samples)[samples]
        if self.is_small:
            return self._factors.part(columns, samples)
        result = self.new_zeros(len(range(self.columns)[columns]), len(wanted), *self.shape)
        if isinstance(self.of_rows.inp, Tensor) and len(wanted) == self.samples:
            for its, product in self.shares():
                result[:, its] = product.part(columns, slice(0, product.samples))
            return result
        owner = self.owner - wanted.start
        few = piece_size(CACHE) // max(1, prod(self.shape) * result.element_size() * len(result))
        for rows in slices(self.of_rows.samples, few):
            own = owner[rows]
            is_wanted = (own >= 0) & (own < len(wanted))
            if bool(is_wanted.any()):
                piece = self.of_rows.part(columns, rows)
                for column in range(len(result)):
                    result[column].index_add_(0, own[is_wanted], piece[column][is_wanted])
        return result

    pieces = SampleProduct.pieces


def _of_rows(mat: Tensor, axis: int, rows: Tensor) -> Tensor:
    """Some entries of an axis; a view if they are consecutive."""
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device)):
        return mat.narrow(axis, first, len(rows))
    return mat.index_select(axis, rows)


@formed.register
def formed_owned(product: OwnedAffine) -> Tensor:
    """See :meth:`OwnedAffine.part`."""
    return product.part(slice(0, product.columns), slice(0, product.samples))


@batch_sum.register
def batch_sum_owned(product: OwnedAffine) -> Tensor:
    """The sum over all rows that belong to a sample."""
    if bool((product.owner < product.samples).all()):
        return batch_sum(product.of_rows)
    every = torch.eye(product.columns, dtype=product.like.dtype, device=product.like.device)
    return weighted_sum(product, every.unsqueeze(2).expand(-1, -1, product.samples))


@weighted_sum.register
def weighted_sum_owned(product: OwnedAffine, weights: Tensor) -> Tensor:
    """The weighted sum of rows, each with the weight of its sample."""
    nobody = weights.new_zeros(*weights.shape[:2], 1)
    return weighted_sum(product.of_rows, torch.cat([weights, nobody], 2)[..., product.owner])
