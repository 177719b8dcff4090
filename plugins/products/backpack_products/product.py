"""Products: what every quantity reads, ``M[v, n] = J_θ[n]ᵀ mat[v, n]`` for columns and samples.

``M`` has the shape ``[V, N, *θ]`` and is hardly ever formed. A product holds what determines it,
and operations (``operations.py``) contract that. A rule returns a product, an extension reads it.
Forms with factors stand in files of their own, with their contractions.

=============== ============================================= ===================================
form            ``M[v, n]``                                   for
=============== ============================================= ===================================
`DenseProduct`  formed, a piece at a time or whole            any parameter
`AffineProduct` ``Σ_s out[v, n, s, g] ⊗ inp[n, s, g]``        linear maps, convolutions, gates
`ScaleProduct`  ``Σ_s out[v, n, s] ⊙ inp[n, s]``              gains and offsets of normalisations
`LookupProduct` ``Σ_k e_{row[n, k]} ⊗ out[v, n, k]``          embeddings
`SumProduct`    ``Σ_p M_p[v, n]``                             a parameter that is used several times
=============== ============================================= ===================================

All extensions of a group read the same product: what one operation computed is kept on it for the
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
from typing import Any, Self

import torch
from torch import Tensor

from backpack_core.contract.operation import OpenFunction
from backpack_core.contract.reading import Reading
from backpack_core.errors import ShapeError
from backpack_core.tuning import memory_budget
from backpack_products.columns import Root
from backpack_products.contractions import slices
from backpack_products.tuning import CACHE

Piece = tuple[slice, slice, Tensor]  # columns, samples, M[columns, samples]


def misfit(form: SampleProduct, expected: str, *factors: Any) -> ShapeError:
    """The error for factors whose axes, or lengths of axes, do not fit the form.

    Args:
        form: The product that they were given to.
        expected: The axes that they should have.
        factors: The factors.
    """
    found = " and ".join(str(list(f.shape)) for f in factors if f is not None)
    return ShapeError(f"{type(form).__name__} takes factors {expected}. Got {found}.")


class SampleProduct(Reading, ABC):
    """A product ``M[v, n]``, ``[V, N, *θ]``, in some form.

    Attributes:
        columns: ``V``.
        samples: ``N``.
        like: A tensor with the product's dtype and device.
        roots: The roots of the columns, and how many columns each has.

    To write:
        ``part(columns, samples)``: ``M`` of some, formed.
    """

    roots: Mapping[Root, int] = MappingProxyType({})

    def __init__(self, columns: int, samples: int, shape: torch.Size, like: Tensor) -> None:
        # Not by super().__init__, since many products are made.
        self.shape, self.columns, self.samples, self.like = shape, columns, samples, like
        self.results, self.made, self.call_cache, self.column_cache = {}, [], {}, {}

    @abstractmethod
    def part(self, columns: slice, samples: slice) -> Tensor:
        """``M`` of some columns and samples, formed. Shape ``[v, n, *θ]``."""

    def pieces(self) -> Iterator[Piece]:
        """``M`` piece by piece, each within the memory budget, as far as one product allows.

        A piece may lie in memory that the next one overwrites: use it before.
        """
        single = max(1, prod(self.shape) * self.like.element_size())
        few = min(self.samples, max(1, memory_budget() // single))
        most = max(1, memory_budget() // (single * max(1, few)))
        for rows, some in pairs(slices(self.samples, few), slices(self.columns, most)):
            yield some, rows, self.part(some, rows)

    def join(self, others: Sequence[SampleProduct]) -> SampleProduct:
        """The sum of products for several uses, over all their columns."""
        return sum_of([self, *others])

    def of_samples(self, samples: int, kept: dict[Any, Any]) -> SampleProduct:
        """The sum over the entries of each sample, in the same form where that is possible."""
        product = regrouped(self, self.columns, samples, kept)
        product.roots = self.roots
        return product

    def at_leaf(
        self, source: Tensor, leaf: Tensor, pull: Callable[[Tensor], Tensor]
    ) -> SampleProduct:
        """Pulled back through the graph of the computation when it is formed."""
        return ComputedProduct(self, leaf, pull)

    def plus(self, others: Sequence[SampleProduct]) -> tuple[SampleProduct, list[SampleProduct]]:
        """The sum with those of some products of the same columns that have this form; the rest.

        Default: with none of them.
        """
        return self, [*others]

    def among(self, roots: Mapping[Root, int]) -> SampleProduct:
        """The product for a larger set of roots, zero for those that it does not have.

        Args:
            roots: All of them, and how many columns each has.
        """
        return self if self.has_roots(roots) else PlacedProduct(self, roots)

    def has_roots(self, roots: Mapping[Root, int]) -> bool:
        """Whether the product has exactly these roots, in this order."""
        return list(self.roots.items()) == list(roots.items())

    def placed_as(self, other: Reading) -> Self:
        """Also with the roots of the other one."""
        if isinstance(other, SampleProduct):
            self.roots = other.roots
        return super().placed_as(other)

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros of the product's dtype."""
        return self.like.new_zeros(shape)

    def __repr__(self) -> str:
        """Form, shape, and where it belongs."""
        shape = [self.columns, self.samples, *self.shape]
        return f"<{type(self).__name__} {shape} of {self.name!r} at {self.path}>"


class DenseProduct(SampleProduct):
    """``M`` itself, or a function that forms any part of it."""

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
            mat: Together with ``form``: columns ``[V, N, *]``, for number, dtype and device.
            shape: Together with ``form``: shape of the parameter.
        """
        like = mat if values is None else values
        assert like is not None
        shape = like.shape[2:] if shape is None else shape
        super().__init__(like.shape[0], like.shape[1], shape, like)
        self.values = values
        self._form = form

    def part(self, columns: slice, samples: slice) -> Tensor:
        """A slice of the values, or what the function returns."""
        if self.values is not None:
            return self.values[columns, samples]
        assert self._form is not None
        return self._form(columns, samples)

    def pieces(self) -> Iterator[Piece]:
        """If the values exist, pieces that stay in the cache."""
        if self.values is None:
            yield from super().pieces()
            return
        step = max(1, CACHE // max(1, self.values[:, :1].nbytes))
        for rows in slices(self.samples, step):
            yield slice(0, self.columns), rows, self.values[:, rows]


class SumProduct(SampleProduct):
    """``Σ_p M_p[v, n]``: of a parameter that several calls, or several outputs of one, use.

    Attributes:
        parts: The summands; no two have the same form in factors.
    """

    def __init__(self, parts: Sequence[SampleProduct]) -> None:
        """Store the summands; use :func:`sum_of` to make one."""
        first = parts[0]
        super().__init__(first.columns, first.samples, first.shape, first.like)
        self.parts = tuple(parts)

    def part(self, columns: slice, samples: slice) -> Tensor:
        """The sum of the parts, formed one after the other."""
        return reduce(torch.add, (part.part(columns, samples) for part in self.parts))

    def lasting(self) -> SampleProduct:
        """The sum of the lasting parts."""
        parts = [part.lasting() for part in self.parts]
        return self if parts == [*self.parts] else SumProduct(parts).placed_as(self)


class PlacedProduct(SampleProduct):
    """A product for a larger set of roots, zero for those that it does not have."""

    def __init__(self, product: SampleProduct, roots: Mapping[Root, int]) -> None:
        """Store the product, and which columns there are in all."""
        super().__init__(sum(roots.values()), product.samples, product.shape, product.like)
        self.roots = roots
        starts = dict(zip(roots, accumulate((0, *roots.values())), strict=False))
        own = zip(product.roots, accumulate((0, *product.roots.values())), strict=False)
        # For each root: where its columns begin here, where in the product, and how many it has.
        self._places = [(starts[root], start, roots[root]) for root, start in own]
        self._product = product

    def part(self, columns: slice, samples: slice) -> Tensor:
        """Zeros, but for the roots that the product has."""
        width = len(range(self.samples)[samples])
        result = self.new_zeros(columns.stop - columns.start, width, *self.shape)
        for here, there, count in self._places:
            first, last = max(here, columns.start), min(here + count, columns.stop)
            if first < last:
                some = slice(there + first - here, there + last - here)
                place = slice(first - columns.start, last - columns.start)
                result[place] = self._product.part(some, samples)
        return result


def sum_of(parts: Sequence[SampleProduct]) -> SampleProduct:
    """The sum of products of one parameter, root by root.

    A weight that is used at several places is a weight that more positions share (Eschenhagen et
    al., 2023, arXiv:2311.00636). So products in factors become a single one if they have one form.
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
    """``Jᵀ M``: the product of a leaf, with ``M`` the product of what was computed from it.

    A parametrization computes a parameter from leaves, or a hook before the forward. The layer rule
    knows the computed tensor only, but results belong on the leaves.
    """

    def __init__(
        self, product: SampleProduct, leaf: Tensor, pull: Callable[[Tensor], Tensor]
    ) -> None:
        """Store the product of the computed tensor, and what carries columns back to the leaf."""
        super().__init__(product.columns, product.samples, leaf.shape, product.like)
        self.roots = product.roots
        self._product = product
        self._pull = pull

    def part(self, columns: slice, samples: slice) -> Tensor:
        """Pulled back through the graph of the computation, for all columns and samples at once."""
        mat = self._product.part(columns, samples)
        product: Tensor = self._pull(mat.flatten(0, 1)).unflatten(0, mat.shape[:2])
        return product

    def lasting(self) -> SampleProduct:
        """The formed product: the graph of the computation goes with the pass."""
        values = self.part(slice(0, self.columns), slice(0, self.samples))
        return DenseProduct(values).placed_as(self)


@OpenFunction
def regrouped(
    product: SampleProduct, columns: int, samples: int, kept: dict[Any, Any]
) -> SampleProduct:
    """A product ``[V, N, *θ]``, from what a rule gave as ``[V · N, B, *θ]`` or ``[V, N · B, *θ]``.

    Args:
        product: The product of the rule.
        columns: ``V``.
        samples: ``N``.
        kept: What is kept of the call; which samples reach which rows is added.

    Returns:
        The sum over ``B``, in the same form where that is possible.
    """
    count = product.samples if product.columns != columns else product.samples // max(1, samples)
    is_apart = product.columns != columns

    def form(some: slice, rows: slice) -> Tensor:
        first, last, _ = rows.indices(samples)
        whole = slice(0, product.samples)
        if not is_apart:
            part = product.part(some, slice(first * count, last * count))
            found: Tensor = part.unflatten(1, (last - first, count)).sum(2)
            return found
        parts = [
            product.part(slice(v * samples + first, v * samples + last), whole).sum(1)
            for v in range(*some.indices(columns))
        ]
        return torch.stack(parts)

    mat = product.new_zeros(1).expand(columns, samples)
    return DenseProduct(form=form, mat=mat, shape=product.shape)
