"""Columns ``[V, N, *]`` at a tensor: the quantity that most propagators send backwards.

A column holds one vector for each sample. Columns are stored by the root that started them: where
branches of the net meet, only columns of one root are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core.errors import InternalError
from backpack_products.apart import taken_apart
from backpack_products.tuning import even_size


class Part(NamedTuple):
    """Which part of all columns a chunk of them is.

    Attributes:
        of: The root of all of them.
        start: The number of the first one.
        stop: The number behind the last one.
        total: How many there are.
    """

    of: Root
    start: int
    stop: int
    total: int


@dataclass(frozen=True, eq=False, repr=False)
class Root:
    """The start of a block of columns, usually a loss; compared by identity.

    Attributes:
        name: A name for messages and debugging.
        signs: The sign of each column for each sample, ``[V, N]``, or one sign of all, ``[]``;
            ``None`` means all positive.
        scale: The factor of each sample's loss; ``None`` if it is unknown.
        turns: Masks ``[K, R]`` of entries of axis 0, if samples have several: of ``V · K`` columns,
            number ``v · K + k`` is zero except at the entries of mask ``k``.
        part: Which part of all columns these are, if they travel in chunks.
    """

    name: str
    signs: Tensor | None = None
    scale: Tensor | None = None
    turns: Tensor | None = None
    part: Part | None = None

    def signs_of(self, columns: slice, samples: Any = slice(None)) -> Tensor | None:
        """The signs of some columns and samples."""
        signs = self.signs
        return signs if signs is None or not signs.dim() else signs[columns, samples]

    def signed(self, flat: Tensor) -> Tensor:
        """Columns ``[V, N, D]`` times their signs, in the dtype of the columns."""
        signs = self.signs
        return flat if signs is None else flat * (signs[..., None] if signs.dim() else signs)


class Columns:
    """Columns ``[V, N, *]`` at a tensor, in one block for each root.

    Columns of one root that arrive over several branches are added. Columns of different roots (two
    losses on one output) stay side by side.

    Attributes:
        blocks: One tensor ``[V, N, *]`` for every root.
    """

    def __init__(self, blocks: Mapping[Root, Tensor]) -> None:
        """Store the blocks."""
        self.blocks = blocks
        if len(blocks) == 1:
            (self.mat,) = blocks.values()

    @classmethod
    def start(
        cls, name: str, mat: Tensor, signs: Tensor | None = None, scale: Tensor | None = None
    ) -> Columns:
        """Columns in a single block, with a new root."""
        return cls({Root(name, signs, scale): mat})

    @cached_property
    def mat(self) -> Tensor:
        """The columns of all roots, one root after the other. Shape ``[V, N, *]``."""
        blocks = [*self.blocks.values()]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has here."""
        return dict(zip(self.blocks, map(len, self.blocks.values()), strict=True))

    def like(self, blocks: Mapping[Root, Tensor]) -> Columns:
        """Columns of the same class, with other blocks."""
        return type(self)(blocks)

    def map(self, function: Callable[[Tensor], Tensor]) -> Columns:
        """Apply a linear function to :attr:`flat`, whose axis 0 it keeps."""
        return self.split(function(self.flat))

    @property
    def flat(self) -> Tensor:
        """All columns on axis 0, each with the shape of the tensor."""
        return self.mat

    def split(self, mat: Tensor) -> Columns:
        """Columns with the same roots, from values in the layout of :attr:`flat`."""
        if len(self.blocks) == 1:
            return self.like(dict.fromkeys(self.blocks, mat))
        parts = mat.split(list(self.sizes.values()))
        columns = self.like(dict(zip(self.blocks, parts, strict=True)))
        columns.mat = mat  # the blocks are views of it
        return columns

    def to(self, dtype: torch.dtype) -> Columns:
        """The same columns in another dtype."""
        if self.mat.dtype == dtype:
            return self
        return self.like({root: block.to(dtype) for root, block in self.blocks.items()})

    def merge(self, other: Columns) -> Columns:
        """The sum with the columns of another branch, root by root."""
        require_one_form(self, other)
        blocks = dict(self.blocks)
        for root, block in other.blocks.items():
            blocks[root] = blocks[root] + block if root in blocks else block
        return self.like(blocks)

    def cut(self, size: int, turns: int = 1) -> tuple[Columns, list[Columns]]:
        """Cut off at most ``size`` columns; the others come in chunks of about that size.

        ``turns`` says how often the columns are repeated, see :meth:`repeated`.
        """
        count = sum(self.sizes.values()) // turns
        *others, last = self.chunks(even_size(count, size), turns) if count > size else [self]
        return last, others

    def chunks(self, size: int, turns: int = 1) -> list[Columns]:
        """Chunks of at most ``size`` columns, each with roots of its own; see :meth:`cut`."""
        result: list[Columns] = []
        for root, block in self.blocks.items():
            by_turn = block.unflatten(0, (turns, len(block) // turns))
            total = by_turn.shape[1]
            for start in range(0, total, size):
                stop = min(total, start + size)
                signs = root.signs_of(slice(start, stop))
                new = Root(root.name, signs, root.scale, part=Part(root, start, stop, total))
                result.append(self.like({new: by_turn[:, start:stop].flatten(0, 1)}))
        return result

    def widened(self, chosen: Sequence[int] | None, turns: int, size: int) -> Columns:
        """Extend columns ``[V, n, *]`` of chosen entries of axis 0 to all, with zeros elsewhere.

        What was chosen several times may have other columns each time (Monte Carlo draws differ),
        so each repetition gets columns of its own.

        Args:
            chosen: The entries; ``None`` stands for all.
            turns: How often the most frequent sample is chosen.
            size: The length of axis 0.
        """
        if chosen is None:
            return self
        turn = _occurrences(chosen, size)

        def widen(mat: Tensor) -> Tensor:
            whole = mat.new_zeros(turns, size, len(mat), *mat.shape[2:])
            whole[turn, [n % size for n in chosen]] = mat.transpose(0, 1)
            return whole.transpose(1, 2).flatten(0, 1)

        return self.like({root: widen(mat) for root, mat in self.blocks.items()})

    def chosen(self, chosen: Sequence[int] | None, turns: int) -> Columns:
        """The columns ``[V, n, *]`` of chosen entries; reverses :meth:`widened`."""
        if chosen is None:
            return self

        def pick(mat: Tensor) -> Tensor:
            size = mat.shape[1]
            parts = mat.unflatten(0, (turns, -1)).movedim(2, 1)
            picked: Tensor = parts[_occurrences(chosen, size), [n % size for n in chosen]]
            return picked.transpose(0, 1)  # [V, n, *]

        return self.like({root: pick(mat) for root, mat in self.blocks.items()})

    def repeated(self, chosen: Sequence[int]) -> Columns:
        """Repeat columns of the whole batch as often as the most frequent sample was chosen."""
        turns = most_often(chosen)
        blocks: dict[Root, Tensor] = {}
        for root, mat in self.blocks.items():
            signs = root.signs_of(slice(None), [*chosen])
            blocks[Root(root.name, signs, root.scale)] = mat.repeat(turns, *[1] * (mat.dim() - 1))
        return Columns(blocks)


class ApartColumns(Columns):
    """Columns ``[V, N, *]`` at a tensor ``[*]`` without samples, kept apart by sample.

    The gradient at a table of positions, or at a tied weight, is a sum over samples. The columns of
    one sample are those that arrive if the columns of all others are zero at the output.
    """

    def like(self, blocks: Mapping[Root, Tensor]) -> Columns:
        """Plain columns kept apart: the result of a special form may not have that form."""
        return ApartColumns(blocks)

    def merge(self, other: Columns) -> Columns:
        """The sum, root by root; in the special form of the other one, if it has one."""
        is_formed = type(self) is ApartColumns and type(other) is not ApartColumns
        return other.merge(self) if is_formed else super().merge(other)

    @property
    def flat(self) -> Tensor:
        """All columns of all samples on axis 0: ``[V·N, *]``."""
        return self.mat.flatten(0, 1)

    def split(self, mat: Tensor) -> Columns:
        """Columns with the same roots, from values ``[V·N, *]``."""
        return super().split(mat.unflatten(0, self.mat.shape[:2]))


class OwnedColumns(ApartColumns):
    """Columns ``[V, R, *]`` whose rows are in no order, together with the sample of each row.

    Attributes:
        plain: The columns ``[V, R, *]``.
        owned: The mask of rows of each sample, ``[N, R]``.
    """

    def __init__(self, plain: Columns, owned: Tensor) -> None:
        self.plain, self.owned = plain, owned

    @cached_property
    def blocks(self) -> Mapping[Root, Tensor]:  # type: ignore[override]
        """The columns of each sample, ``[V, N, R, *]``, zero at the rows of others."""
        return {r: taken_apart(mat, self.owned) for r, mat in self.plain.blocks.items()}

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has."""
        return self.plain.sizes

    def formed(self) -> ApartColumns:
        """The same as plain tensors."""
        return ApartColumns(self.blocks)


class InRuns(ApartColumns):
    """Columns ``[V, *]`` in which each entry belongs to one sample.

    In row-major order, entry ``f`` of the tensor belongs to sample ``f // run % N``. So one set of
    columns holds those of all samples.

    Attributes:
        plain: The columns ``[V, *]``.
        samples: ``N``.
        run: How many consecutive entries belong to one sample.
    """

    def __init__(self, plain: Columns, samples: int, run: int) -> None:
        self.plain, self.samples, self.run = plain, samples, run

    @cached_property
    def blocks(self) -> Mapping[Root, Tensor]:  # type: ignore[override]
        """The columns of each sample, ``[V, N, *]``, zero at the entries of others."""
        return {root: self._taken_apart(mat) for root, mat in self.plain.blocks.items()}

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has."""
        return self.plain.sizes

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return next(iter(self.plain.blocks.values())).shape[1:]

    @property
    def is_in_front(self) -> bool:
        """Whether samples are on axis 0, one after the other."""
        rows, entries = self.shape[:1].numel(), self.shape.numel()
        return not rows % self.samples and self.run * self.samples == entries

    def are_side_by_side(self, positions: int | Tensor) -> bool:
        """Whether samples are on axis 0, one after the other, each with a number of entries."""
        if not self.is_in_front or isinstance(positions, Tensor):
            return False
        return positions * self.samples == self.shape[:1].numel()

    def with_rows(self, mat: Tensor) -> InRuns | None:
        """Other columns with rows of the same samples; ``None`` if they have more or fewer rows."""
        if mat.shape[1:2] != self.shape[:1]:
            return None
        return InRuns(self.plain.split(mat), self.samples, mat.shape[1:].numel() // self.samples)

    def to(self, dtype: torch.dtype) -> Columns:
        """The same columns in another dtype."""
        return InRuns(self.plain.to(dtype), self.samples, self.run)

    def merge(self, other: Columns) -> Columns:
        """The sum; in the same form if the runs have the same length."""
        if isinstance(other, InRuns) and other.run == self.run:
            return InRuns(self.plain.merge(other.plain), self.samples, self.run)
        return super().merge(other)

    def _taken_apart(self, mat: Tensor) -> Tensor:
        """``[V, *] → [V, N, *]``: the entries of each sample on a diagonal of zeros."""
        runs = mat.reshape(len(mat), -1, self.samples, self.run)
        apart = torch.zeros_like(runs).unsqueeze(1).repeat(1, self.samples, 1, 1, 1)
        apart.diagonal(dim1=1, dim2=3).copy_(runs.movedim(2, -1))
        return apart.reshape(len(mat), self.samples, *mat.shape[1:])


def split_positions(columns: Columns, owners: Tensor | None, samples: int) -> Columns:
    """Give the rows of one sample columns of their own: ``[V, R, *] → [V · K, R, *]``.

    Args:
        columns: ``[V, R, *]``.
        owners: The sample of each row, ``[R]``; ``None`` if all rows may belong to one sample.
        samples: The number of samples.

    Returns:
        ``[V · K, R, *]``, with a sign for each sample.
    """
    turns, owned = _turns(owners, columns.mat.shape[1], samples)
    blocks: dict[Root, Tensor] = {}
    for root, mat in columns.blocks.items():
        signs = root.signs
        if signs is not None and signs.dim():
            turn, own = (mask.to(signs.device, signs.dtype) for mask in (turns, owned))
            signs = torch.einsum("vr,kr,nr->vkn", signs, turn, own).flatten(0, 1)
        blocks[Root(root.name, signs, root.scale, turns)] = taken_apart(mat, turns).flatten(0, 1)
    return Columns(blocks)


def _turns(owners: Tensor | None, count: int, samples: int) -> tuple[Tensor, Tensor]:
    """Masks of the rows that share a column, ``[K, R]``, and of the rows of samples, ``[N, R]``."""
    rows = torch.arange(count, device="cpu")
    if owners is None:
        return rows == rows[:, None], torch.ones(samples, count, dtype=torch.bool, device="cpu")
    owners = owners.cpu()
    order, counts = owners.argsort(stable=True), owners.bincount()
    turns = torch.empty_like(owners)
    turns[order] = rows - (counts.cumsum(0) - counts)[owners[order]]
    sets = torch.arange(int(counts.max()) if count else 1, device="cpu")
    return turns == sets[:, None], owners == torch.arange(samples, device="cpu")[:, None]


def require_one_form(first: Columns, second: Columns) -> None:
    """Check that both are kept apart by sample, or neither: otherwise one would be misread.

    Raises:
        InternalError: Only one is kept apart.
    """
    are_apart = {isinstance(each, ApartColumns) for each in (first, second) if each.blocks}
    if len(are_apart) > 1:
        raise InternalError("Columns of every sample apart met columns of all samples.")


def most_often(chosen: Sequence[int]) -> int:
    """How often the most frequent of the chosen samples occurs."""
    return max(Counter(chosen).values(), default=1)


def _occurrences(chosen: Sequence[int], size: int) -> list[int]:
    """How often each entry occurred before: ``(3, 1, 3) → [0, 0, 1]``."""
    seen: dict[int, int] = {}
    turns = []
    for index in chosen:
        entry = index % size
        turns.append(seen.get(entry, 0))
        seen[entry] = turns[-1] + 1
    return turns
