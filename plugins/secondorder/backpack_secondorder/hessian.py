"""The Hessian of the loss at one tensor, in the cheapest exact form. Knows no layer and no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from backpack_core import Columns
from backpack_core.columns import Root
from backpack_core.ops.signed import unit_columns


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

    @cached_property
    def columns(self) -> Columns:
        """Formed: ``[V, N, *]``."""
        roots = self.weights.abs().sqrt()
        lead = roots.reshape(*roots.shape, *[1] * (self.rows.dim() - 2))
        return Columns.start("residual", self.rows * lead * self.scale, self.weights.sign())

    def diagonal(self) -> Tensor:
        """Shape ``[N, *]``."""
        product = self.weights.T @ self.rows.flatten(1).square()
        return product.reshape(self.scale.shape) * self.scale.square()

    def matmul(self, mat: Tensor) -> Tensor:
        """The product with ``[V, N, *]``."""
        rows = self.rows.flatten(1)
        inner = (mat * self.scale).flatten(2) @ rows.T * self.weights.T  # [V, N, rows]
        return (inner @ rows).reshape(mat.shape) * self.scale


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
        branched: Roots of columns that went separate ways somewhere.
    """

    columns: Columns | None = None
    diagonal: Tensor | None = None
    spread: Spread | None = None
    block: Tensor | None = None
    branched: frozenset[Root] = frozenset()

    @property
    def width(self) -> int:
        """How many columns there are, or would be."""
        width = 0 if self.columns is None else sum(map(len, self.columns.blocks.values()))
        width += 0 if self.diagonal is None else self.diagonal.shape[1:].numel()
        width += 0 if self.spread is None else len(self.spread.rows)
        return width + (0 if self.block is None else len(self.block))

    def signed_columns(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """``S`` and ``σ`` of every root: ``[V, N, *]`` and ``[V, N]`` (``None``: all positive)."""
        for root, mat in {} if self.columns is None else self.columns.blocks.items():
            yield mat, root.signs

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

    def matmul(self, mat: Tensor) -> Tensor:
        """The product with ``[V, N, *]``."""
        result = torch.zeros_like(mat)
        flat = mat.flatten(2).transpose(0, 1)  # [N, V, D]
        for columns, signs in self.signed_columns():
            wide = columns.flatten(2).transpose(0, 1)  # [N, C, D]
            inner = flat @ wide.mT
            inner = inner if signs is None else inner * signs.T.unsqueeze(1)
            result = result + (inner @ wide).transpose(0, 1).reshape(mat.shape)
        if self.spread is not None:
            result = result + self.spread.matmul(mat)
        if self.diagonal is not None:
            result = result + mat * self.diagonal
        if self.block is not None:
            product = flat @ self.block.flatten(2).transpose(0, 1)
            result = result + product.transpose(0, 1).reshape(mat.shape)
        return result

    def formed(self) -> Hessian:
        """The same with the spread as columns."""
        if self.spread is None:
            return self
        return replace(self, spread=None).merge(Hessian(self.spread.columns))

    def as_columns(self) -> Hessian:
        """The same with columns only."""
        result = replace(self.formed(), diagonal=None, block=None)
        if self.diagonal is not None:
            ((mat, signs),) = unit_columns(self.diagonal)
            result = result.merge(Hessian(Columns.start("residual", mat, signs)))
        if self.block is not None:
            result = result.merge(Hessian(block_columns(self.block)))
        return result

    def as_block(self) -> Hessian:
        """The same with all that did not branch in the dense block."""
        formed = self.formed()
        kept: dict[Root, Tensor] = {}
        block = self.block
        for root, mat in {} if formed.columns is None else formed.columns.blocks.items():
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

    def own_diagonal(self) -> Tensor:
        """The diagonal of all but the columns. Shape ``[N, *]``.

        Raises:
            ValueError: There is nothing but columns.
        """
        result = self.diagonal
        if self.spread is not None:
            result = add(result, self.spread.diagonal())
        if self.block is not None:
            flat = self.block.flatten(2).diagonal(dim1=0, dim2=2)
            result = add(result, flat.reshape(self.block.shape[1:]))
        if result is None:
            raise ValueError("There is nothing but columns.")
        return result

    def merge(self, other: Hessian) -> Hessian:
        """The sum of what arrived over two branches."""
        if self.spread is not None and other.spread is not None:
            return self.formed().merge(other)
        columns = self.columns or other.columns
        if self.columns is not None and other.columns is not None:
            columns = self.columns.merge(other.columns)
        return Hessian(
            columns,
            add(self.diagonal, other.diagonal),
            self.spread or other.spread,
            add(self.block, other.block),
            self.branched | other.branched,
        )


def block_columns(block: Tensor) -> Columns:
    """A dense block ``H`` as ``2 D`` columns with signs, without an eigendecomposition.

    With the rows ``h_d`` of ``H``, it is ``1/4 Σ_d (a e_d + h_d/a)(·)ᵀ - (a e_d - h_d/a)(·)ᵀ``. The
    scale ``a² = ‖h_d‖`` balances both parts.

    Args:
        block: Rows ``[D, N, *]``.

    Returns:
        Columns ``[2 D, N, *]``.
    """
    size, samples = block.shape[:2]
    rows = block.reshape(size, samples, size)
    tiny = torch.finfo(block.dtype).tiny
    scale = rows.norm(dim=2, keepdim=True).clamp_min(tiny).sqrt()
    unit = torch.eye(size, dtype=block.dtype, device=block.device).unsqueeze(1) * scale
    mat = torch.cat([unit + rows / scale, unit - rows / scale]) / 2
    signs = block.new_ones(2 * size, samples)
    signs[size:] = -1
    return Columns.start("block", mat.reshape(2 * size, *block.shape[1:]), signs)


def unit_vectors(like: Tensor) -> Tensor:
    """All unit vectors at a tensor ``[N, *]``, for each sample: ``[D, N, *]``."""
    size = like.shape[1:].numel()
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return eye.reshape(size, 1, *like.shape[1:]).expand(-1, *like.shape)


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum, where ``None`` is zero."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
