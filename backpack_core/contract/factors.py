"""The base of products in factors, which all have columns at positions that samples share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backpack_core.contract.columns import Root
from backpack_core.contract.product import SampleProduct
from backpack_core.record.untouched import Versions


class FactorProduct(SampleProduct):
    """A sum over positions, of columns and of what the parameter meets there.

    Attributes:
        out: Columns at each position. Shape ``[V, N, S, *]``.
        other: What the parameter meets. Shape ``[N, S, *]``, or ``None``.
        is_own: Which positions each sample has, ``[N, S]``, ``None`` for all. Columns are zero at
            the others.

    To write:
        ``with_factors(out, other, is_own)``: a product of this form.
    """

    out: Tensor
    is_own: Tensor | None = None

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

    def among(self, roots: Mapping[Root, int]) -> SampleProduct:
        """The same form, with columns of zeros for the other roots."""
        if self.has_roots(roots):
            return self
        blocks = dict(zip(self.roots, self.out.split(list(self.roots.values())), strict=True))
        zeros = self.new_zeros(*self.out.shape[1:])
        found = [blocks.get(root, zeros.expand(n, *zeros.shape)) for root, n in roots.items()]
        return self.with_factors(torch.cat(found), self.other, self.is_own)

    def over_positions(self, same: Sequence[FactorProduct], other: Any) -> SampleProduct:
        """The sum with others of the form, over the positions of all; ``other`` is that of all."""
        parts = [self, *same]
        is_own = None
        if any(part.is_own is not None for part in parts):
            every = [p.out.new_ones(p.out.shape[1:3], dtype=torch.bool) for p in parts]
            each = zip(parts, every, strict=True)
            is_own = torch.cat([all_ if p.is_own is None else p.is_own for p, all_ in each], 1)
        return self.with_factors(torch.cat([part.out for part in parts], 2), other, is_own)
