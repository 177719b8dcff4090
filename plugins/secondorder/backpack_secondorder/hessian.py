"""The Hessian at a tensor, in the cheapest exact form: what ``SignedSqrt`` sends backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from backpack_core import Columns
from backpack_core.contract.columns import Root
from backpack_core.contract.contractions import slices
from backpack_secondorder.signed import unit_columns


@dataclass(frozen=True, eq=False)
class Spread:
    """``diag(a) Jᵀ diag(d) J diag(a)``, one matrix ``J`` for all samples: columns not yet formed.

    Attributes:
        rows: ``J``, shape ``[V, 1, *]``.
        weights: ``d``, shape ``[V, N]``.
        scale: ``a``, shape ``[N, *]``.
    """

    rows: Tensor
    weights: Tensor
    scale: Tensor

    def to(self, dtype: torch.dtype) -> Spread:
        """The same in another precision."""
        return Spread(self.rows.to(dtype), self.weights.to(dtype), self.scale.to(dtype))

    def columns(self, some: slice = slice(None)) -> Columns:
        """Formed: ``[V, N, *]``."""
        rows, weights = self.rows[some], self.weights[some]
        lead = weights.abs().sqrt().reshape(*weights.shape, *[1] * (rows.dim() - 2))
        return Columns.start("residual", rows * lead * self.scale, weights.sign())

    def diagonal(self) -> Tensor:
        """Shape ``[N, *]``."""
        product = self.weights.T @ self.rows.flatten(1).square()
        return product.reshape(self.scale.shape) * self.scale.square()


@dataclass(frozen=True, eq=False)
class Hessian:
    """``Σ_v σ_v S_v S_vᵀ + diag(d) + H`` for each sample.

    What comes from one root over several branches has to be added before it is squared. Only
    columns can do that. So all else holds what has come, and will go, over a single path.

    Attributes:
        columns: ``S``, with signs in the roots; ``None`` for none.
        diagonal: ``d``, shape ``[N, *]``; ``None`` for zero.
        spread: More columns, in factored form; ``None`` for none.
        block: ``H``, as its rows ``[D, N, *]``; ``None`` for zero.
        rows: The rows of a residual that is too large to be formed, ``D`` and a function of a
            slice of them; it is shed where it came into being.
        branched: Roots of columns that went separate ways somewhere.
    """

    columns: Columns | None = None
    diagonal: Tensor | None = None
    spread: Spread | None = None
    block: Tensor | None = None
    rows: tuple[int, Callable[[slice], Tensor]] | None = None
    branched: frozenset[Root] = frozenset()

    @property
    def formed(self) -> int:
        """How many columns there are."""
        return 0 if self.columns is None else sum(self.columns.sizes.values())

    @property
    def unformed(self) -> int:
        """How many there would be of the rest."""
        width = 0 if self.diagonal is None else self.diagonal.shape[1:].numel()
        width += 0 if self.spread is None else len(self.spread.rows)
        width += 0 if self.rows is None else 2 * self.rows[0]
        return width + (0 if self.block is None else 2 * len(self.block))

    def signed_columns(self) -> Iterator[tuple[Root, Tensor]]:
        """``S`` of every root, ``[V, N, *]``; the root has the signs."""
        yield from () if self.columns is None else self.columns.blocks.items()

    def to(self, dtype: torch.dtype) -> Hessian:
        """The same in another precision: under autocast, neighbouring layers differ in theirs."""
        columns = None if self.columns is None else self.columns.to(dtype)
        diagonal, block = (None if t is None else t.to(dtype) for t in (self.diagonal, self.block))
        spread = None if self.spread is None else self.spread.to(dtype)
        return replace(self, columns=columns, diagonal=diagonal, spread=spread, block=block)

    def map_columns(self, function: Callable[[Tensor], Tensor]) -> Hessian:
        """Apply a linear function of ``[V, N, *]`` to the columns, root by root."""
        if self.columns is None:
            return self
        blocks = {root: function(mat) for root, mat in self.columns.blocks.items()}
        return replace(self, columns=Columns(blocks))

    def scaled(self, scale: Tensor) -> Hessian:
        """``diag(a) · diag(a)`` around all of it, for ``a`` of shape ``[N, *]``."""
        diagonal, block, spread = self.diagonal, self.block, self.spread
        if diagonal is not None:
            diagonal = diagonal * scale.square()
        if spread is not None:
            spread = replace(spread, scale=spread.scale * scale)
        if block is not None:
            rows = scale.flatten(1).T
            rows = rows.reshape(*rows.shape, *[1] * (scale.dim() - 1))
            block = block * scale * rows
        result = self.map_columns(lambda mat: mat * scale)
        return replace(result, diagonal=diagonal, spread=spread, block=block)

    def chunks(self, size: int) -> Iterator[Hessian]:
        """All that is not formed, as columns, in parts of at most ``size``."""
        if self.diagonal is not None:
            for some in slices(self.diagonal.shape[1:].numel(), size):
                mat, signs = unit_columns(self.diagonal, some)
                yield Hessian(Columns.start("residual", mat, signs))
        if self.spread is not None:
            for some in slices(len(self.spread.rows), size):
                yield Hessian(self.spread.columns(some))
        if self.block is not None:
            for some in slices(len(self.block), max(1, size // 2)):
                yield Hessian(block_columns(self.block[some], some))
        if self.rows is not None:
            for some in slices(self.rows[0], max(1, size // 2)):
                yield Hessian(block_columns(self.rows[1](some), some))

    def as_columns(self) -> Hessian:
        """The same with columns only."""
        result = replace(self, diagonal=None, block=None, spread=None, rows=None)
        for part in self.chunks(max(1, self.unformed)):
            result = result.merge(part)
        return result

    def as_block(self) -> Hessian:
        """The same with all that did not branch in the dense block."""
        spread = self.spread
        formed = (
            self if spread is None else replace(self, spread=None).merge(Hessian(spread.columns()))
        )
        kept: dict[Root, Tensor] = {}
        block = self.block
        for root, mat in formed.signed_columns():
            if root in self.branched:
                kept[root] = mat
                continue
            flat = mat.flatten(2)
            signed = flat if root.signs is None else flat * root.signs.unsqueeze(-1)
            product = (signed.permute(1, 2, 0) @ flat.transpose(0, 1)).transpose(0, 1)
            block = add(block, product.reshape(flat.shape[2], *mat.shape[1:]))
        if self.diagonal is not None:
            dense = torch.diag_embed(self.diagonal.flatten(1)).transpose(0, 1)
            block = add(block, dense.reshape(dense.shape[0], *self.diagonal.shape))
        return Hessian(Columns(kept) if kept else None, block=block, branched=self.branched)

    @cached_property
    def own_diagonal(self) -> Tensor | None:
        """The diagonal of all but the columns. Shape ``[N, *]``; ``None`` if there is no more."""
        result = self.diagonal
        if self.spread is not None:
            result = add(result, self.spread.diagonal())
        if self.block is not None:
            flat = self.block.flatten(2).diagonal(dim1=0, dim2=2)
            result = add(result, flat.reshape(self.block.shape[1:]))
        return result

    def merge(self, other: Hessian) -> Hessian:
        """The sum of what arrived over two branches."""
        if self.spread is not None and other.spread is not None:
            spread = Hessian(self.spread.columns())
            return replace(self, spread=None).merge(spread).merge(other)
        columns = self.columns or other.columns
        if self.columns is not None and other.columns is not None:
            columns = self.columns.merge(other.columns)
        return Hessian(
            columns,
            add(self.diagonal, other.diagonal),
            self.spread or other.spread,
            add(self.block, other.block),
            self.rows or other.rows,
            self.branched | other.branched,
        )


def block_columns(rows: Tensor, some: slice) -> Columns:
    """A dense block ``H`` as ``2 D`` columns with signs, without an eigendecomposition.

    With the rows ``h_d`` of ``H``, it is ``1/4 Σ_d (a e_d + h_d/a)(·)ᵀ - (a e_d - h_d/a)(·)ᵀ``. The
    scale ``a² = ‖h_d‖`` balances both parts.

    Args:
        rows: Some rows ``[d, N, *]``.
        some: Which they are.

    Returns:
        Columns ``[2 d, N, *]``.
    """
    count, samples, *shape = rows.shape
    size = torch.Size(shape).numel()
    flat = rows.reshape(count, samples, size)
    tiny = torch.finfo(rows.dtype).tiny
    scale = flat.norm(dim=2, keepdim=True).clamp_min(tiny).sqrt()
    unit = torch.eye(size, dtype=rows.dtype, device=rows.device)[some].unsqueeze(1) * scale
    mat = torch.cat([unit + flat / scale, unit - flat / scale]) / 2
    signs = rows.new_ones(2 * count, samples)
    signs[count:] = -1
    return Columns.start("block", mat.reshape(2 * count, samples, *shape), signs)


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum, where ``None`` is zero."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
