"""The base of products in factors, which all have columns at positions that samples share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import base_of
from backpack_core.record.guards import Versions
from backpack_core.record.owner import is_parameter
from backpack_products.columns import Root
from backpack_products.product import SampleProduct


class FactorProduct(SampleProduct):
    """A sum over positions, of columns and of what the parameter meets there.

    Attributes:
        out: Columns at each position. Shape ``[V, N, S, *]``.
        other: What the parameter meets. Shape ``[N, S, *]``, or ``None``.
        is_own: Which positions each sample has, ``[N, S]``, ``None`` for all. Columns are zero at
            the others.
        uses: How many positions each use of the parameter has, one behind the other, and each in
            the order of what the module met; empty for a single use.

    To write:
        ``with_factors(out, other, is_own)``: a product of this form. Optional:
        ``has_form_of(other)`` and ``joined(others)``, for a parameter that is used several times.
    """

    out: Tensor
    is_own: Tensor | None = None
    uses: tuple[int, ...] = ()

    @property
    @abstractmethod
    def other(self) -> Any:
        """See the class."""

    @abstractmethod
    def with_factors(self, out: Tensor, other: Any, is_own: Tensor | None) -> SampleProduct:
        """A product of the same form, and of the same parameter."""

    def held(self) -> Versions:
        """The factors that are tensors."""
        found = [(self.out, self.out._version)]
        for factor in (self.other, self.is_own):
            if isinstance(factor, Tensor):
                found.append((factor, factor._version))
        return found

    def lasting(self) -> SampleProduct:
        """With a copy of what the parameter meets if that is a parameter as well.

        It may be updated before this one is read: hooks of optimizers do so as soon as its gradient
        is there.
        """
        kept = _without_parameters(self.other)
        if kept is self.other:
            return self
        lasting: SampleProduct = self._joining([self], self.out, kept, self.is_own)
        return lasting.placed_as(self)

    def among(self, roots: Mapping[Root, int]) -> SampleProduct:
        """The same form, with columns of zeros for the other roots."""
        if self.has_roots(roots):
            return self
        blocks = dict(zip(self.roots, self.out.split(list(self.roots.values())), strict=True))
        zeros = self.new_zeros(*self.out.shape[1:])
        found = [blocks.get(root, zeros.expand(n, *zeros.shape)) for root, n in roots.items()]
        placed: SampleProduct = self._joining([self], torch.cat(found), self.other, self.is_own)
        return placed

    def has_form_of(self, other: SampleProduct) -> bool:
        """Whether a product of the same parameter has this form."""
        if not isinstance(other, FactorProduct) or type(other) is not type(self):
            return False
        return (other.other is None) == (self.other is None)

    def joined(self, others: Sequence[Any]) -> Any:
        """What the parameter meets at the positions of several products of the form."""
        return torch.cat([*others], 1)

    def plus(self, others: Sequence[SampleProduct]) -> tuple[SampleProduct, list[SampleProduct]]:
        """One product over the positions of all that have this form; those of another form."""
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
        """A product with the positions of several of this form."""
        found: Any = self.with_factors(*factors)
        found.uses = tuple(n for part in parts for n in part.uses or (part.out.shape[2],))
        return found


def _without_parameters(factor: Any) -> Any:
    """A tensor, or an object that makes rows of some, with copies of those that are parameters."""
    if factor is None or isinstance(factor, Tensor):
        return factor.clone() if factor is not None and _is_of_parameter(factor) else factor
    held = vars(factor).items()
    copies = {n: t.clone() for n, t in held if isinstance(t, Tensor) and _is_of_parameter(t)}
    if copies:
        factor = copy(factor)
        vars(factor).update(copies)
    return factor


def _is_of_parameter(tensor: Tensor) -> bool:
    base = base_of(tensor)
    return is_parameter(tensor if base is None else base)
