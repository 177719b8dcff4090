"""The Hessian at a tensor in the cheapest exact form, the quantity of ``SignedSqrt``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from einops import rearrange
from torch import Tensor

from backpack_operations.operands import FactoredColumns
from backpack_products import Columns
from backpack_products.columns import ApartColumns, Root
from backpack_products.contractions import flattened, slices
from backpack_secondorder.residual import unit_vectors
from backpack_secondorder.signed import unit_columns


@dataclass(frozen=True, eq=False)
class Factored:
    """``diag(a) Jᵀ diag(d) J diag(a)`` with one ``J`` for all samples: columns not yet formed.

    Attributes:
        rows: ``J``, shape ``[V, 1, *]``.
        weights: ``d``, shape ``[V, N]``.
        scale: ``a``, shape ``[N, *]``.
    """

    rows: Tensor
    weights: Tensor
    scale: Tensor

    def to(self, dtype: torch.dtype) -> Factored:
        """The same in another precision."""
        return Factored(self.rows.to(dtype), self.weights.to(dtype), self.scale.to(dtype))

    def columns(self, some: slice = slice(None)) -> Columns:
        """The columns themselves, ``[V, N, *]``."""
        rows, weights = self.rows[some], self.weights[some]
        lead = weights.abs().sqrt().reshape(*weights.shape, *[1] * (rows.dim() - 2))
        return Columns.start("residual", rows * lead * self.scale, weights.sign())

    def diagonal(self) -> Tensor:
        """Shape ``[N, *]``."""
        product = self.weights.T @ flattened(self.rows, 1).square()
        return product.reshape(self.scale.shape) * self.scale.square()


@dataclass(frozen=True, eq=False)
class Hessian:
    """``Σ_v σ_v S_v S_vᵀ + diag(d) + H`` for each sample.

    Parts of one root that arrive along several branches must be added before they are squared, and
    only columns can be added in this way. So the other forms hold only parts that travel along a
    single path, from their start to their end.

    Attributes:
        columns: ``S``, with signs in the roots; ``None`` for none.
        diagonal: ``d``, shape ``[N, *]``; ``None`` for zero.
        factored: More columns, in factored form; ``None`` for none.
        block: ``H``, as its rows ``[D, N, *]``; ``None`` for zero.
        rows: A residual that is too large to form: ``D``, and a function that gives a slice of its
            rows. It is sent on in chunks where it arose, or formed at the next call.
        branched: Roots of columns that were sent along several paths somewhere.
    """

    columns: Columns | None = None
    diagonal: Tensor | None = None
    factored: Factored | None = None
    block: Tensor | None = None
    rows: tuple[int, Callable[[slice], Tensor]] | None = None
    branched: frozenset[Root] = frozenset()

    @property
    def is_apart(self) -> bool:
        """Whether the columns are kept apart by sample, at a tensor without samples."""
        return isinstance(self.columns, ApartColumns)

    @property
    def formed(self) -> int:
        """The number of columns."""
        return 0 if self.columns is None else sum(self.columns.sizes.values())

    @property
    def unformed(self) -> int:
        """The number of columns that the other forms would need."""
        width = 0 if self.diagonal is None else self.diagonal.shape[1:].numel()
        width += 0 if self.factored is None else len(self.factored.rows)
        width += 0 if self.rows is None else 2 * self.rows[0]
        return width + (0 if self.block is None else 2 * len(self.block))

    def signed_columns(self) -> Iterator[tuple[Root, Tensor]]:
        """``S`` of every root, ``[V, N, *]``; the root has the signs."""
        yield from () if self.columns is None else self.columns.blocks.items()

    def by_root(self) -> Iterator[tuple[Root, Columns]]:
        """The columns of every root, in their form."""
        columns = self.columns
        if isinstance(columns, FactoredColumns):
            for root, products in columns.products.items():
                yield root, FactoredColumns({root: products})
        elif columns is not None:
            yield from ((root, columns.like({root: mat})) for root, mat in columns.blocks.items())

    def to(self, dtype: torch.dtype) -> Hessian:
        """The same in another precision: under autocast, neighbouring layers differ in theirs."""
        columns = None if self.columns is None else self.columns.to(dtype)
        diagonal, block = (None if t is None else t.to(dtype) for t in (self.diagonal, self.block))
        factored = None if self.factored is None else self.factored.to(dtype)
        return replace(self, columns=columns, diagonal=diagonal, factored=factored, block=block)

    def map_columns(self, function: Callable[[Tensor], Tensor]) -> Hessian:
        """Apply a linear function to all columns, as :meth:`Columns.map` does."""
        return self if self.columns is None else replace(self, columns=self.columns.map(function))

    def scaled(self, scale: Tensor) -> Hessian:
        """``diag(a) H diag(a)`` for ``a`` of shape ``[N, *]``."""
        diagonal, block, factored = self.diagonal, self.block, self.factored
        if diagonal is not None:
            diagonal = diagonal * scale.square()
        if factored is not None:
            factored = replace(factored, scale=factored.scale * scale)
        if block is not None:
            rows = flattened(scale, 1).T
            rows = rows.reshape(*rows.shape, *[1] * (scale.dim() - 1))
            block = block * scale * rows
        result = self.map_columns(lambda mat: mat * scale)
        return replace(result, diagonal=diagonal, factored=factored, block=block)

    def chunks(self, size: int) -> Iterator[Hessian]:
        """The other forms as columns, at most ``size`` at a time."""
        if self.diagonal is not None:
            for some in slices(self.diagonal.shape[1:].numel(), size):
                mat, signs = unit_columns(self.diagonal, some)
                yield Hessian(Columns.start("residual", mat, signs))
        if self.factored is not None:
            for some in slices(len(self.factored.rows), size):
                yield Hessian(self.factored.columns(some))
        if self.block is not None:
            for some in slices(len(self.block), max(1, size // 2)):
                yield Hessian(block_columns(self.block[some], some))
        if self.rows is not None:
            for some in slices(self.rows[0], max(1, size // 2)):
                yield Hessian(block_columns(self.rows[1](some), some))

    def with_rows_formed(self) -> Hessian:
        """The same Hessian, with ``rows`` formed and added to the block."""
        if self.rows is None:
            return self
        size, rows = self.rows
        return replace(self, rows=None, block=add(self.block, rows(slice(0, size))))

    def as_columns(self) -> Hessian:
        """The same Hessian as columns only."""
        result = replace(self, diagonal=None, block=None, factored=None, rows=None)
        for part in self.chunks(max(1, self.unformed)):
            result = result.merge(part)
        return result

    def as_block(self) -> Hessian:
        """The same Hessian, with everything that did not branch in the dense block."""
        factored = self.factored
        formed = (
            self
            if factored is None
            else replace(self, factored=None).merge(Hessian(factored.columns()))
        )
        kept: dict[Root, Tensor] = {}
        block = self.block
        for root, mat in formed.signed_columns():
            if root in self.branched:
                kept[root] = mat
                continue
            flat = flattened(mat, 2)
            signed = root.signed(flat)
            left, right = rearrange(signed, "v n d -> n d v"), rearrange(flat, "v n e -> n v e")
            product = rearrange(left @ right, "n d e -> d n e")
            block = add(block, product.reshape(flat.shape[2], *mat.shape[1:]))
        if self.diagonal is not None:
            dense = rearrange(torch.diag_embed(flattened(self.diagonal, 1)), "n d e -> d n e")
            block = add(block, dense.reshape(len(dense), *self.diagonal.shape))
        return Hessian(Columns(kept) if kept else None, block=block, branched=self.branched)

    @cached_property
    def own_diagonal(self) -> Tensor | None:
        """The diagonal of all forms except the columns. Shape ``[N, *]``; ``None`` for zero."""
        result = self.diagonal
        if self.factored is not None:
            result = add(result, self.factored.diagonal())
        if self.block is not None:
            flat = flattened(self.block, 2).diagonal(dim1=0, dim2=2)
            result = add(result, flat.reshape(self.block.shape[1:]))
        return result

    def merge(self, other: Hessian) -> Hessian:
        """The sum of two Hessians that arrived along different branches."""
        if self.rows is not None and other.rows is not None:
            return self.with_rows_formed().merge(other)
        if self.factored is not None and other.factored is not None:
            factored = Hessian(self.factored.columns())
            return replace(self, factored=None).merge(factored).merge(other)
        columns = self.columns or other.columns
        if self.columns is not None and other.columns is not None:
            columns = self.columns.merge(other.columns)
        return Hessian(
            columns,
            add(self.diagonal, other.diagonal),
            self.factored or other.factored,
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
        some: The numbers of these rows.

    Returns:
        Columns ``[2 d, N, *]``.
    """
    count, samples, *shape = rows.shape
    size = torch.Size(shape).numel()
    flat = rows.reshape(count, samples, size)
    tiny = torch.finfo(rows.dtype).tiny
    scale = flat.norm(dim=2, keepdim=True).clamp_min(tiny).sqrt()
    unit = flattened(unit_vectors(rows[0], some), 2) * scale
    mat = torch.cat([unit + flat / scale, unit - flat / scale]) / 2
    signs = rows.new_ones(2 * count, samples)
    signs[count:] = -1
    return Columns.start("block", mat.reshape(2 * count, samples, *shape), signs)


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum; ``None`` stands for zero."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
