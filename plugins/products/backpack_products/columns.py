"""Columns at a tensor: the quantity that most propagators send backwards.

They remember the root that started them, since columns of one root are added where branches meet,
before anything is squared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from backpack_core.errors import InternalError
from backpack_products.apart import taken_apart
from backpack_products.tuning import even_size


@dataclass(frozen=True, eq=False, repr=False)
class Root:
    """Where a block of columns was started; compared by identity.

    Attributes:
        name: For messages and debugging.
        signs: Sign of each column for each sample, ``[V, N]``; ``None`` means all positive.
        scale: The factor in front of each sample's loss; ``None`` if it is unknown.
        turns: Which entries of axis 0 have columns beside those of others, ``[K, R]``, if samples
            have several: of ``V · K`` columns, ``v · K + k`` is zero but at the entries ``k``.
    """

    name: str
    signs: Tensor | None = None
    scale: Tensor | None = None
    turns: Tensor | None = None


class Columns:
    """Columns ``[V, N, *]`` at a tensor, in one block for each root that started some.

    Columns of one root that arrive over several branches are added. Those of different roots (two
    losses on one output, say) stay side by side.

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
        """All columns side by side. Shape ``[V, N, *]``."""
        blocks = [*self.blocks.values()]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has here."""
        return dict(zip(self.blocks, map(len, self.blocks.values()), strict=True))

    def like(self, blocks: Mapping[Root, Tensor]) -> Columns:
        """Columns of the same class."""
        return type(self)(blocks)

    def map(self, function: Callable[[Tensor], Tensor]) -> Columns:
        """Apply a linear function that keeps axis 0 of :attr:`flat`."""
        return self.split(function(self.flat))

    @property
    def flat(self) -> Tensor:
        """All columns, each with the shape of the tensor."""
        return self.mat

    def split(self, mat: Tensor) -> Columns:
        """Columns with the same roots, and the values of ``mat`` in the layout of :attr:`flat`."""
        if len(self.blocks) == 1:
            return self.like(dict.fromkeys(self.blocks, mat))
        parts = mat.split(list(self.sizes.values()))
        found = self.like(dict(zip(self.blocks, parts, strict=True)))
        found.mat = mat  # they are views of it
        return found

    def to(self, dtype: torch.dtype) -> Columns:
        """The same columns in another dtype."""
        if self.mat.dtype == dtype:
            return self
        return self.like({root: block.to(dtype) for root, block in self.blocks.items()})

    def merge(self, other: Columns) -> Columns:
        """The sum with what arrived over another branch, root by root."""
        require_one_form(self, other)
        blocks = dict(self.blocks)
        for root, block in other.blocks.items():
            blocks[root] = blocks[root] + block if root in blocks else block
        return self.like(blocks)

    def cut(self, size: int, turns: int = 1) -> tuple[Columns, list[Columns]]:
        """At most ``size`` of the columns, and the others in sets of about that size.

        Args:
            size: How many, for one of the turns.
            turns: How often all are there, see :meth:`repeated`.
        """
        count = sum(self.sizes.values()) // turns
        *others, last = self.chunks(even_size(count, size), turns) if count > size else [self]
        return last, others

    def chunks(self, size: int, turns: int = 1) -> list[Columns]:
        """The columns in sets of at most ``size``, each with roots of its own; see :meth:`cut`."""
        result: list[Columns] = []
        for root, block in self.blocks.items():
            by_turn = block.unflatten(0, (turns, len(block) // turns))
            for start in range(0, by_turn.shape[1], size):
                window = slice(start, start + size)
                signs = None if root.signs is None else root.signs[window]
                part = by_turn[:, window].flatten(0, 1)
                result.append(self.like({Root(root.name, signs, root.scale): part}))
        return result

    def widened(self, chosen: Sequence[int] | None, batch_size: int) -> Columns:
        """Columns ``[V, n, *]`` of chosen samples as columns of the whole batch, zero elsewhere.

        A sample that was chosen several times may have other columns each time (drawn ones have),
        so each repetition becomes columns of its own. ``None`` stands for all samples.
        """
        if chosen is None:
            return self
        turns = _occurrences(chosen, batch_size)

        def widen(mat: Tensor) -> Tensor:
            whole = mat.new_zeros(1 + max(turns, default=0), batch_size, len(mat), *mat.shape[2:])
            whole[turns, [n % batch_size for n in chosen]] = mat.transpose(0, 1)
            return whole.transpose(1, 2).flatten(0, 1)

        return self.like({root: widen(mat) for root, mat in self.blocks.items()})

    def chosen(self, chosen: Sequence[int] | None) -> Columns:
        """The reverse of :meth:`widened`."""
        if chosen is None:
            return self

        def pick(mat: Tensor) -> Tensor:
            samples = mat.shape[1]
            turns = _occurrences(chosen, samples)
            parts = mat.unflatten(0, (1 + max(turns, default=0), -1)).movedim(2, 1)
            found: Tensor = parts[turns, [n % samples for n in chosen]]  # [n, V, *]
            return found.transpose(0, 1)

        return self.like({root: pick(mat) for root, mat in self.blocks.items()})

    def repeated(self, chosen: Sequence[int]) -> Columns:
        """Columns of the whole batch, as often as one of some samples is chosen.

        What :meth:`chosen` takes of them is that of these samples; who is not among them counts
        nowhere.
        """
        turns = most_often(chosen)
        blocks: dict[Root, Tensor] = {}
        for root, mat in self.blocks.items():
            signs = None if root.signs is None else root.signs[:, [*chosen]]
            blocks[Root(root.name, signs, root.scale)] = mat.repeat(turns, *[1] * (mat.dim() - 1))
        return Columns(blocks)


class ApartColumns(Columns):
    """Columns ``[V, N, *]`` at a tensor ``[*]`` without samples: every sample has its own.

    The gradient of a table of positions, or of a tied weight, is a sum over samples. The columns of
    one sample are what arrives if the columns of all others are zero.
    """

    def like(self, blocks: Mapping[Root, Tensor]) -> Columns:
        """Formed columns: what is computed from those of another form has lost the form."""
        return ApartColumns(blocks)

    def merge(self, other: Columns) -> Columns:
        """Root by root; in the other one's form, if that is more special."""
        is_formed = type(self) is ApartColumns and type(other) is not ApartColumns
        return other.merge(self) if is_formed else super().merge(other)

    @property
    def flat(self) -> Tensor:
        """All columns, each with the shape of the tensor: ``[V·N, *]``."""
        return self.mat.flatten(0, 1)

    def split(self, mat: Tensor) -> Columns:
        """From the layout ``[V·N, *]``."""
        return super().split(mat.unflatten(0, self.mat.shape[:2]))


class OwnedColumns(ApartColumns):
    """Columns ``[V, R, *]`` whose rows are in no order, as columns of every sample's own.

    Attributes:
        plain: The columns as they are.
        owned: Which rows each sample has, ``[N, R]``.
    """

    def __init__(self, plain: Columns, owned: Tensor) -> None:
        self.plain, self.owned = plain, owned

    @cached_property
    def blocks(self) -> Mapping[Root, Tensor]:  # type: ignore[override]
        """Formed when they are asked for: ``[V, N, R, *]``, zero at the rows of others."""
        return {r: taken_apart(mat, self.owned) for r, mat in self.plain.blocks.items()}

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has."""
        return self.plain.sizes

    def formed(self) -> ApartColumns:
        """As a tensor for each root."""
        return ApartColumns(self.blocks)


class InRuns(ApartColumns):
    """Columns ``[V, *]`` of which each entry is one sample's, as columns of every sample's own.

    In the order of memory, entry ``f`` of the tensor is of sample ``f // run % N``.

    Attributes:
        plain: The columns as they are.
        samples: ``N``.
        run: How many entries in a row are of one sample.
    """

    def __init__(self, plain: Columns, samples: int, run: int) -> None:
        self.plain, self.samples, self.run = plain, samples, run

    @cached_property
    def blocks(self) -> Mapping[Root, Tensor]:  # type: ignore[override]
        """Formed when they are asked for: ``[V, N, *]``, zero at the entries of others."""
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
        """Whether samples are on axis 0, each with so many entries."""
        if not self.is_in_front or isinstance(positions, Tensor):
            return False
        return positions * self.samples == self.shape[:1].numel()

    def with_rows(self, mat: Tensor) -> InRuns | None:
        """Other columns with the rows of these; ``None`` if they have not as many."""
        if mat.shape[1:2] != self.shape[:1]:
            return None
        return InRuns(self.plain.split(mat), self.samples, mat.shape[1:].numel() // self.samples)

    def to(self, dtype: torch.dtype) -> Columns:
        """The same columns in another dtype."""
        return InRuns(self.plain.to(dtype), self.samples, self.run)

    def merge(self, other: Columns) -> Columns:
        """As they are, if runs are as long; else formed."""
        if isinstance(other, InRuns) and other.run == self.run:
            return InRuns(self.plain.merge(other.plain), self.samples, self.run)
        return super().merge(other)

    def _taken_apart(self, mat: Tensor) -> Tensor:
        """Zeros, and on a diagonal the entries of each sample."""
        runs = mat.reshape(len(mat), -1, self.samples, self.run)
        apart = torch.zeros_like(runs).unsqueeze(1).repeat(1, self.samples, 1, 1, 1)
        apart.diagonal(dim1=1, dim2=3).copy_(runs.movedim(2, -1))
        return apart.reshape(len(mat), self.samples, *mat.shape[1:])


def split_positions(columns: Columns, owners: Tensor | None, samples: int) -> Columns:
    """Columns of rows as columns of samples: rows of one sample get columns of their own.

    Args:
        columns: ``[V, R, *]``.
        owners: The sample of each row, ``[R]``; ``None`` if all may be of one.
        samples: How many samples there are.

    Returns:
        ``[V · K, R, *]``, with a sign for each sample.
    """
    turns, owned = _turns(owners, columns.mat.shape[1], samples)
    blocks: dict[Root, Tensor] = {}
    for root, mat in columns.blocks.items():
        signs = root.signs
        if signs is not None:
            shown, own = (mask.to(signs.device, signs.dtype) for mask in (turns, owned))
            signs = torch.einsum("vr,kr,nr->vkn", signs, shown, own).flatten(0, 1)
        blocks[Root(root.name, signs, root.scale, turns)] = taken_apart(mat, turns).flatten(0, 1)
    return Columns(blocks)


def _turns(owners: Tensor | None, count: int, samples: int) -> tuple[Tensor, Tensor]:
    """Which rows share a column, ``[K, R]``, and which each sample may have, ``[N, R]``."""
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
    """See that both are kept apart by sample, or none: a tensor is one or the other.

    Added up, one would be broadcast, or taken for something else.

    Raises:
        InternalError: They are not.
    """
    are_apart = {isinstance(each, ApartColumns) for each in (first, second) if each.blocks}
    if len(are_apart) > 1:
        raise InternalError("Columns of every sample apart met columns of all samples.")


def most_often(chosen: Sequence[int]) -> int:
    """How often the most frequent of some samples is chosen."""
    return max(Counter(chosen).values(), default=1)


def _occurrences(chosen: Sequence[int], batch_size: int) -> list[int]:
    """How often each number occurs before: ``(3, 1, 3) → [0, 0, 1]``."""
    seen: dict[int, int] = {}
    found = []
    for index in chosen:
        sample = index % batch_size
        found.append(seen.get(sample, 0))
        seen[sample] = found[-1] + 1
    return found
