"""The base of products in factors: a sum over positions of columns times another factor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import base_of, version_of
from backpack_products.columns import Root
from backpack_products.held import Versions
from backpack_products.product import SampleProduct
from backpack_products.rows import CastRows, tensors_behind
from backpack_products.substitutes import is_parameter


class FactorProduct(SampleProduct):
    """A product that is a sum over positions: of columns, and of what multiplies the parameter.

    Attributes:
        out: Columns at each position. Shape ``[V, N, S, *]``.
        other: What multiplies the parameter. Shape ``[N, S, *]``, or ``None``.
        is_own: The mask of positions that each sample has, ``[N, S]``; ``None`` for all. Columns
            are zero at the others.
        uses: The number of positions of each use of the parameter, in the order in which the
            positions follow each other; empty for a single use.

    To write:
        ``with_factors(out, other, is_own)``: a product of this form with other factors. Optional:
        ``has_form_of(other)`` and ``joined(others)``, for a parameter that is used several times.
    """

    out: Tensor
    is_own: Tensor | None = None
    uses: tuple[int, ...] = ()

    @property
    @abstractmethod
    def other(self) -> Any:
        """What multiplies the parameter, ``[N, S, *]``, or ``None``."""

    @abstractmethod
    def with_factors(self, out: Tensor, other: Any, is_own: Tensor | None) -> SampleProduct:
        """A product of the same form, for the same parameter, with other factors."""

    def held(self) -> Versions:
        """The factors, and what they are created from, with versions."""
        factors = (self.out, self.other, self.is_own)
        return [(tensor, version_of(tensor)) for tensor in tensors_behind(factors)]

    def lasting(self) -> SampleProduct:
        """The product with a copy of the other factor, if that is a parameter itself.

        An optimizer's hook may update that parameter as soon as it has a gradient, before this
        product is read.
        """
        other = _without_parameters(self.other)
        if other is self.other:
            return self
        lasting: SampleProduct = self._joining([self], self.out, other, self.is_own)
        return lasting.placed_as(self)

    def in_dtype(self, dtype: torch.dtype) -> SampleProduct:
        """The product in another dtype, in the same form."""
        if self.like.dtype is dtype:
            return self
        other = self.other
        if isinstance(other, Tensor):
            other = other.to(dtype) if other.is_floating_point() else other
        elif other is not None:
            other = CastRows(other, dtype)
        cast: SampleProduct = self._joining([self], self.out.to(dtype), other, self.is_own)
        cast.roots = self.roots
        return cast

    def among(self, roots: Mapping[Root, int]) -> SampleProduct:
        """The product for more roots, in the same form, with columns of zeros for the others."""
        if self.has_roots(roots):
            return self
        blocks = dict(zip(self.roots, self.out.split(list(self.roots.values())), strict=True))
        zeros = self.new_zeros(*self.out.shape[1:])
        every = [blocks.get(root, zeros.expand(n, *zeros.shape)) for root, n in roots.items()]
        placed: SampleProduct = self._joining([self], torch.cat(every), self.other, self.is_own)
        return placed

    def has_form_of(self, other: SampleProduct) -> bool:
        """Whether a product of the same parameter has this form."""
        if not isinstance(other, FactorProduct) or type(other) is not type(self):
            return False
        return (other.other is None) == (self.other is None)

    def joined(self, others: Sequence[Any]) -> Any:
        """The other factors of several products of this form, concatenated along positions."""
        return torch.cat([*others], 1)

    def plus(self, others: Sequence[SampleProduct]) -> tuple[SampleProduct, list[SampleProduct]]:
        """Add the products of this form, as one over all their positions; also returns the rest."""
        fits = [self.has_form_of(product) for product in others]
        parts: list[Any] = [self, *compress(others, fits)]
        rest = [product for product, is_same in zip(others, fits, strict=True) if not is_same]
        if len(parts) == 1:
            return self, rest
        other = None if self.other is None else self.joined([part.other for part in parts])
        is_own = None
        if any(part.is_own is not None for part in parts):
            every = [p.out.new_ones(p.out.shape[1:3], dtype=torch.bool) for p in parts]
            each = zip(parts, every, strict=True)
            is_own = torch.cat([all_ if p.is_own is None else p.is_own for p, all_ in each], 1)
        return self._joining(parts, torch.cat([p.out for p in parts], 2), other, is_own), rest

    def _joining(self, parts: Sequence[FactorProduct], *factors: Any) -> Any:
        """A product with given factors, and with the uses of several products."""
        joined: Any = self.with_factors(*factors)
        joined.uses = tuple(n for part in parts for n in part.uses or (part.out.shape[2],))
        return joined


def _without_parameters(factor: Any) -> Any:
    """A factor (a tensor, or an object made of tensors), with parameters in it copied."""
    if factor is None or isinstance(factor, Tensor):
        return factor.clone() if factor is not None and _is_of_parameter(factor) else factor
    held = vars(factor).items()
    copies = {n: t.clone() for n, t in held if isinstance(t, Tensor) and _is_of_parameter(t)}
    if copies:
        factor = copy(factor)
        vars(factor).update(copies)
    return factor


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    base = base_of(tensor)
    return is_parameter(tensor if base is None else base)
