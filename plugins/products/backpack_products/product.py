"""Products ``M[v, n] = J_θ[n]ᵀ mat[v, n]`` of columns and samples, which extensions read.

``M`` has the shape ``[V, N, *θ]`` and is hardly ever formed. A product holds the factors of ``M``,
and operations (``operations.py``) contract these. A rule returns a product, an extension reads it.
Each form in factors has a file of its own, with its contractions.

=============== ============================================= ===================================
form            ``M[v, n]``                                   for
=============== ============================================= ===================================
`DenseProduct`  formed, a piece at a time or whole            any parameter
`AffineProduct` ``Σ_s out[v, n, s, g] ⊗ inp[n, s, g]``        linear maps, convolutions, gates
`ScaleProduct`  ``Σ_s out[v, n, s] ⊙ inp[n, s]``              gains and offsets of normalisations
`LookupProduct` ``Σ_k e_{row[n, k]} ⊗ out[v, n, k]``          embeddings
`SumProduct`    ``Σ_p M_p[v, n]``                             a parameter that is used several times
=============== ============================================= ===================================

All extensions of a group read the same product, which stores the results of operations for the
others. Axis letters: ``V`` columns, ``N`` samples, ``S`` shared positions, ``G`` groups, ``I`` and
``O`` features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from itertools import product as pairs
from math import prod
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch import Tensor

from backpack_core.contract.propagator import Reading
from backpack_core.errors import ShapeError
from backpack_products.columns import Root
from backpack_products.contractions import slices
from backpack_products.held import Versions, held_by
from backpack_products.open_functions import OpenFunction
from backpack_products.tuning import CACHE, memory_budget

Piece = tuple[slice, slice, Tensor]  # columns, samples, M[columns, samples]


def misfit(form: SampleProduct, expected: str, *factors: Any) -> ShapeError:
    """The error for factors whose shapes do not fit a form.

    Args:
        form: The product.
        expected: The axes that they should have.
        factors: The factors.
    """
    shapes = " and ".join(str(list(f.shape)) for f in factors if f is not None)
    return ShapeError(f"{type(form).__name__} takes factors {expected}. Got {shapes}.")


class SampleProduct(Reading, ABC):
    """The base of products ``M``, ``[V, N, *θ]``, in all forms.

    Attributes:
        columns: ``V``.
        samples: ``N``.
        like: A tensor with the product's dtype and device.
        roots: The roots of the columns, and how many columns each has.

    To write:
        ``part(columns, samples)``: ``M`` of some columns and samples, formed.
    """

    roots: Mapping[Root, int] = MappingProxyType({})

    def __init__(self, columns: int, samples: int, shape: torch.Size, like: Tensor) -> None:
        # Without super().__init__, which would take longer: many products are made.
        self.shape, self.columns, self.samples, self.like = shape, columns, samples, like
        self.results, self.made, self.call_cache, self.column_cache = {}, [], {}, {}

    @abstractmethod
    def part(self, columns: slice, samples: slice) -> Tensor:
        """``M`` of some columns and samples, formed. Shape ``[v, n, *θ]``."""

    def pieces(self) -> Iterator[Piece]:
        """Yields ``M`` piece by piece, each within the memory budget or as large as one product.

        The next piece may overwrite the memory of the last one.
        """
        single = max(1, prod(self.shape) * self.like.element_size())
        few = min(self.samples, max(1, memory_budget() // single))
        most = max(1, memory_budget() // (single * max(1, few)))
        for rows, some in pairs(slices(self.samples, few), slices(self.columns, most)):
            yield some, rows, self.part(some, rows)

    def join(self, others: Sequence[SampleProduct]) -> SampleProduct:
        """The sum with products of further uses of the parameter, root by root."""
        return sum_of([self, *others])

    def of_samples(self, samples: int, kept: dict[Any, Any]) -> SampleProduct:
        """The product summed over the rows of each sample, in the same form if possible."""
        product = regrouped(self, self.columns, samples, kept)
        product.roots = self.roots
        return product

    def at_leaf(
        self, source: Tensor, leaf: Tensor, pull: Callable[[Tensor], Tensor]
    ) -> SampleProduct:
        """The product at a leaf that the parameter was computed from, pulled back when formed."""
        return ComputedProduct(self, leaf, pull)

    def plus(self, others: Sequence[SampleProduct]) -> tuple[SampleProduct, list[SampleProduct]]:
        """Add those products of the same columns that have this form; also returns the others.

        Default: none of them has it.
        """
        return self, [*others]

    def in_dtype(self, dtype: torch.dtype) -> SampleProduct:
        """The product in another dtype, in the same form if possible."""
        return self if self.like.dtype is dtype else CastProduct(self, dtype)

    def among(self, roots: Mapping[Root, int]) -> SampleProduct:
        """The product for more roots, zero for roots that it does not have.

        Args:
            roots: All roots, and how many columns each has.
        """
        return self if self.has_roots(roots) else PlacedProduct(self, roots)

    def has_roots(self, roots: Mapping[Root, int]) -> bool:
        """Whether the product has exactly these roots, in this order."""
        return list(self.roots.items()) == list(roots.items())

    def placed_as(self, other: Reading) -> Self:
        """Take over where another product belongs, with its roots."""
        if isinstance(other, SampleProduct):
            self.roots = other.roots
        return super().placed_as(other)

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros of the product's dtype and device."""
        return self.like.new_zeros(shape)

    def __repr__(self) -> str:
        """The form, the shape, and the parameter."""
        shape = [self.columns, self.samples, *self.shape]
        return f"<{type(self).__name__} {shape} of {self.name!r} at {self.path}>"


class DenseProduct(SampleProduct):
    """``M`` as a tensor, or a function that forms any part of it."""

    def __init__(
        self,
        values: Tensor | None = None,
        *,
        form: Callable[[slice, slice], Tensor] | None = None,
        mat: Tensor | None = None,
        shape: torch.Size | None = None,
    ) -> None:
        """Store the values, or the function that forms them.

        Args:
            values: ``M``, of shape ``[V, N, *θ]``.
            form: ``(columns, samples) ↦ M[columns, samples]``.
            mat: With ``form``: a tensor ``[V, N, *]`` with the numbers, dtype and device of ``M``.
            shape: With ``form``: the shape of the parameter.
        """
        like = mat if values is None else values
        assert like is not None
        shape = like.shape[2:] if shape is None else shape
        super().__init__(like.shape[0], like.shape[1], shape, like)
        self.values = values
        self._form = form

    def part(self, columns: slice, samples: slice) -> Tensor:
        """A slice of the values, or the result of the function."""
        if self.values is not None:
            return self.values[columns, samples]
        assert self._form is not None
        return self._form(columns, samples)

    def pieces(self) -> Iterator[Piece]:
        """Yields pieces that fit into the cache, if the values exist."""
        if self.values is None:
            yield from super().pieces()
            return
        step = max(1, CACHE // max(1, self.values[:, :1].nbytes))
        for rows in slices(self.samples, step):
            yield slice(0, self.columns), rows, self.values[:, rows]


class SumProduct(SampleProduct):
    """The sum ``Σ_p M_p[v, n]`` for a parameter with several uses.

    Attributes:
        parts: The summands; no two of them have the same form in factors.
    """

    def __init__(self, parts: Sequence[SampleProduct]) -> None:
        """Store the summands; use :func:`sum_of` to make one."""
        # Under autocast, uses may differ in precision.
        dtype = reduce(torch.promote_types, (part.like.dtype for part in parts))
        self.parts = tuple(part.in_dtype(dtype) for part in parts)
        first = self.parts[0]
        super().__init__(first.columns, first.samples, first.shape, first.like)

    def part(self, columns: slice, samples: slice) -> Tensor:
        """The sum of the formed parts."""
        return reduce(torch.add, (part.part(columns, samples) for part in self.parts))

    def in_dtype(self, dtype: torch.dtype) -> SampleProduct:
        """The sum of the parts in another dtype."""
        return SumProduct([part.in_dtype(dtype) for part in self.parts])

    def held(self) -> Versions:
        """The tensors of all parts."""
        return [entry for part in self.parts for entry in held_by(part)]

    def lasting(self) -> SampleProduct:
        """The sum of the lasting parts."""
        parts = [part.lasting() for part in self.parts]
        return self if parts == [*self.parts] else SumProduct(parts).placed_as(self)


class CastProduct(SampleProduct):
    """A product in another dtype."""

    def __init__(self, product: SampleProduct, dtype: torch.dtype) -> None:
        """Store the product."""
        columns, samples = product.columns, product.samples
        like = product.like.new_ones((), dtype=dtype).expand(columns, samples)
        super().__init__(columns, samples, product.shape, like)
        self._product, self.roots = product, product.roots

    def part(self, columns: slice, samples: slice) -> Tensor:
        """``M`` of some columns and samples."""
        return self._product.part(columns, samples).to(self.like.dtype)

    def held(self) -> Versions:
        """The tensors of the product."""
        return held_by(self._product)

    def lasting(self) -> SampleProduct:
        """The lasting product, in the same dtype."""
        product = self._product.lasting()
        return self if product is self._product else product.in_dtype(self.like.dtype)


class PlacedProduct(SampleProduct):
    """A product for more roots than another product has, with zeros for these."""

    def __init__(self, product: SampleProduct, roots: Mapping[Root, int]) -> None:
        """Store the product and all roots."""
        super().__init__(sum(roots.values()), product.samples, product.shape, product.like)
        self.roots = roots
        starts = dict(zip(roots, accumulate((0, *roots.values())), strict=False))
        own = zip(product.roots, accumulate((0, *product.roots.values())), strict=False)
        # For each root: where its columns begin here, where in the product, and how many there are.
        self._ranges = [(starts[root], start, roots[root]) for root, start in own]
        self._product = product

    def part(self, columns: slice, samples: slice) -> Tensor:
        """Zeros, except for the columns of roots that the product has."""
        width = len(range(self.samples)[samples])
        result = self.new_zeros(columns.stop - columns.start, width, *self.shape)
        for here, there, count in self._ranges:
            first, last = max(here, columns.start), min(here + count, columns.stop)
            if first < last:
                some = slice(there + first - here, there + last - here)
                target = slice(first - columns.start, last - columns.start)
                result[target] = self._product.part(some, samples)
        return result

    def held(self) -> Versions:
        """The tensors of the product."""
        return held_by(self._product)


def sum_of(parts: Sequence[SampleProduct]) -> SampleProduct:
    """The sum of the products of one parameter, root by root.

    A weight with several uses is a weight that more positions share (Eschenhagen et al., 2023,
    arXiv:2311.00636). So products in factors of the same form become a single one.
    """
    roots: dict[Root, int] = {}
    for part in parts:
        roots.update(part.roots)
    merged: list[SampleProduct] = []
    rest = [part.among(roots) for part in parts]
    while rest:
        whole, rest = rest[0].plus(rest[1:])
        merged.append(whole)
    result = merged[0] if len(merged) == 1 else SumProduct(merged)
    result.roots = roots
    return result


class ComputedProduct(SampleProduct):
    """The product ``Jᵀ M`` of a leaf, with ``M`` the product of a tensor computed from it.

    A parametrization, or a forward pre-hook, computes a parameter from leaves. The layer rule knows
    the computed tensor only, but results belong to the leaves.
    """

    def __init__(
        self, product: SampleProduct, leaf: Tensor, pull: Callable[[Tensor], Tensor]
    ) -> None:
        """Store the product of the computed tensor, and the function that applies ``Jᵀ``."""
        like = product.like
        if like.is_floating_point() and leaf.is_floating_point():
            like = like.to(leaf.dtype)  # autocast computes in another precision than the leaf has
        super().__init__(product.columns, product.samples, leaf.shape, like)
        self.roots = product.roots
        self._product = product
        self._pull = pull

    def part(self, columns: slice, samples: slice) -> Tensor:
        """``Jᵀ M`` of some columns and samples, through the graph of the computation."""
        mat = self._product.part(columns, samples)
        pulled = self._pull(mat.flatten(0, 1)).to(self.like.dtype)
        product: Tensor = pulled.unflatten(0, mat.shape[:2])
        return product

    def lasting(self) -> SampleProduct:
        """The formed product, since the graph of the computation is freed with the pass."""
        values = self.part(slice(0, self.columns), slice(0, self.samples))
        return DenseProduct(values).placed_as(self)


IS_TABLE: Final = "is a table"
SHARED_ROWS: Final = "shared rows"


@OpenFunction
def regrouped(
    product: SampleProduct, columns: int, samples: int, kept: dict[Any, Any]
) -> SampleProduct:
    """The product ``[V, N, *θ]`` from a product ``[V · N, B, *θ]`` or ``[V, N · B, *θ]`` of a rule.

    Args:
        product: The product of the rule.
        columns: ``V``.
        samples: ``N``.
        kept: ``view.call_cache`` of the call; the rows that samples reach are noted there. Under
            ``IS_TABLE`` it says whether all samples share the rows. Under ``SHARED_ROWS`` it may
            have a set, for the numbers of samples and rows of calls whose rows several samples
            reach.

    Returns:
        The sum over ``B``, in the same form if possible.
    """
    count = product.samples if product.columns != columns else product.samples // max(1, samples)
    is_apart = product.columns != columns

    def form(some: slice, rows: slice) -> Tensor:
        first, last, _ = rows.indices(samples)
        whole = slice(0, product.samples)
        if not is_apart:
            part = product.part(some, slice(first * count, last * count))
            summed: Tensor = part.unflatten(1, (last - first, count)).sum(2)
            return summed
        parts = [
            product.part(slice(v * samples + first, v * samples + last), whole).sum(1)
            for v in range(*some.indices(columns))
        ]
        return torch.stack(parts)

    mat = product.new_zeros(1).expand(columns, samples)
    return DenseProduct(form=form, mat=mat, shape=product.shape)
