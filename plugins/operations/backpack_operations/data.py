"""Finds the sample ids of data that no graph made, by comparing them with what the model received.

The model's inputs have the samples on axis 0; or each tensor of a list is one sample, which
``parts.py`` finds out. Before the first module, users slice, transpose, join, pad and pick these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Final, TypeAlias

import torch
from torch import Tensor

from backpack_core._torch import has_memory, memory_of
from backpack_core.record.models import Run
from backpack_operations.codes import codes, mixed
from backpack_operations.received import (
    ModelInput,
    ModelRun,
    Place,
    SampleLayout,
    layout_of,
    span_of,
)
from backpack_operations.row_sums import WHOLE, Sums, can_add, has_rows, sums_of
from backpack_operations.sample_ids import SampleIds, Shape, along, shortened, viewed
from backpack_operations.tensor_lists import can_join, joinable, lists_of_kinds
from backpack_products.values import is_symbolic

MOST_ROWS: Final = 2**20  # that are looked for; among more, sorting would take seconds
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Source:
    """From which rows of a tensor that the model received data were picked.

    Plans do not differ by it: another pass may pick other rows of the same samples.

    Attributes:
        path: Where the model received that tensor.
        axes: How many of its first axes tell rows apart.
        rows: The number of each row there, ``[R]``.
    """

    path: Place
    axes: int
    rows: Tensor

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Source)

    __hash__ = None  # type: ignore[assignment]

    def gives(self, data: Tensor, run: Run) -> bool:
        """Whether data of another pass come from the same rows."""
        given = next((each.tensor() for each in run.inputs if each.path == self.path), None)
        if given is None or given.dtype != data.dtype or given.device != data.device:
            return False
        line = given.shape[self.axes :].numel()  # plans with data are for equal shapes only
        rows: Tensor = given.reshape(-1, line)[self.rows.to(data.device)]
        return rows.equal(data.reshape(-1, line))


Note: TypeAlias = Callable[[Source | None], object]


def of_data(
    data: Tensor,
    run: Run,
    samples: Tensor,
    depth: int | None = None,
    items: Sequence[Tensor] | None = None,
    is_readable: bool = True,
    note: Note = lambda _: None,
) -> SampleIds | None:
    """The sample ids of data used in a run of a model, by what the model received.

    Strides tell the ids of views. Values are compared where data were copied in another order
    (``x.transpose(0, 1).reshape(-1, D)``) or several tensors were joined.

    Args:
        data: The data.
        run: The run.
        samples: The sample of each row that the model received.
        depth: The depth in the arguments at which each item is one sample; ``None`` for no depth.
        items: What the user said of each tensor that the model received: the samples of its rows,
            or its only one.
        is_readable: Whether values may be compared.
        note: Called if the data have rows that the model received, by their values; with the rows
            that they were picked from, if they were.
    """
    return _Data(data, run, samples, depth, items, is_readable, note).ids()


def is_unclear(data: Tensor, run: Run, samples: Tensor, note: Note = lambda _: None) -> bool:
    """Whether rows were picked unevenly from what a model received, of unknown samples.

    Args:
        data: What a module received, for which :func:`of_data` found nothing.
        run: The run.
        samples: The sample of each row that the model received.
        note: As for :func:`of_data`.
    """
    return _Data(data, run, samples, None, None, True, note).is_unclear()


@dataclass(frozen=True)
class Picked:
    """Rows that were picked from another tensor.

    Attributes:
        ids: The sample of each row: that of the first equal row of the tensor.
        is_clear: Whether all rows of the tensor that equal a picked one belong to one sample.
        rows: The first equal row of the tensor.
        of_all: A number for each row of the tensor; equal rows have the same.
        of_picked: The same for the picked rows.
        owners: The sample of each row of the tensor.
    """

    ids: SampleIds
    is_clear: bool
    rows: Tensor
    of_all: Tensor
    of_picked: Tensor
    owners: Tensor

    @property
    def is_uneven(self) -> bool:
        """Whether they stand in the order of the tensor, but not as many of each sample."""
        owners, of_picked = self.owners, self.of_picked
        samples, left = int(owners.max()) + 1, iter(self.of_all.tolist())
        if not all(value in left for value in of_picked.tolist()):  # each search goes on
            return False
        share, rest = divmod(len(of_picked), samples)
        has = torch.zeros(samples, int(self.of_all.max()) + 1, dtype=torch.bool, device="cpu")
        has[owners, self.of_all] = True
        in_order = torch.arange(samples, device="cpu").repeat_interleave(share)
        return bool(rest) or not bool(has[in_order, of_picked].all())


def picked_from(whole: Tensor, data: Tensor, owners: Tensor, axes: int) -> Picked | None:
    """Find rows in a tensor; ``None`` if any row is not one of its rows, or all are equal.

    Args:
        whole: The tensor.
        data: The rows.
        owners: The sample of each entry of axis 0 of the tensor.
        axes: How many of its first axes tell rows apart.
    """
    line = whole.shape[axes:]
    lead = data.shape[: data.dim() - len(line)]
    if not lead or data.shape[len(lead) :] != line or not data.numel() or not whole.numel():
        return None
    all_rows, picked = whole.reshape(-1, line.numel()), data.reshape(-1, line.numel())
    if max(len(all_rows), len(picked)) > MOST_ROWS:
        return None
    if bool((picked == picked[:1]).all()) or not bool((all_rows == picked[:1]).all(1).any()):
        return None
    # Rows become numbers of their different values; each value has a first and a last owner.
    _, values = torch.cat([_hashed(all_rows), _hashed(picked)]).unique(return_inverse=True)
    of_all, of_picked = values.cpu().split([len(all_rows), len(picked)])
    owners = owners.repeat_interleave(len(all_rows) // len(owners))
    count, size, most = int(values.max()) + 1, len(all_rows), int(owners.max())
    first = torch.full((count,), size, device="cpu")
    first = first.scatter_reduce(0, of_all, torch.arange(size, device="cpu"), "amin")
    # Owners are in any order, if the user said which rows belong to which sample.
    least = torch.full((count,), most, device="cpu").scatter_reduce(0, of_all, owners, "amin")
    last = torch.full((count,), -1, device="cpu").scatter_reduce(0, of_all, owners, "amax")
    rows = first[of_picked]
    if bool((rows == size).any()) or not all_rows[rows.to(all_rows.device)].equal(picked):
        return None
    ids = owners[rows].reshape(*lead, *[1] * len(line))
    # Length one, where all along an axis are one sample's; the first one only before another.
    for axis in [*range(1, len(lead)), 0]:
        one = ids.narrow(axis, 0, 1)
        ids = one if (axis or one.numel() > 1) and bool((ids == one).all()) else ids
    is_clear = bool((least == last)[of_picked].all())
    return Picked(ids, is_clear, rows, of_all, of_picked, owners)


def _hashed(rows: Tensor) -> Tensor:
    """A number for each row ``[R, E] → [R]``; equal rows have the same. Sorting rows takes longer.

    Different rows have different numbers but for chance. Sums of integers are exact in any order.
    """
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    if rows.is_floating_point():
        rows = (rows + 0.0).contiguous().view(_BITS[rows.element_size()])  # -0.0 equals 0.0
    if rows.shape[1] == 1:
        return rows[:, 0].long()
    weights = codes(rows.shape[1]) | 1
    return (mixed(rows.long()) * weights.to(rows.device)).sum(1)


class _Data:
    """Data of a module, and what the model received, whose samples are known."""

    def __init__(
        self,
        data: Tensor,
        run: Run,
        samples: Tensor,
        depth: int | None,
        items: Sequence[Tensor] | None,
        is_readable: bool,
        note: Note,
    ) -> None:
        self._received, self._run, self._note = data, run, note
        self._shape: Shape = tuple(data.shape)
        self._is_readable = is_readable and has_memory(data) and not is_symbolic(data)
        # Lists of tensors with one sample each.
        self._samples, self._lists = samples, list[list[ModelInput]]()
        # Lengths say nothing of several arguments, which seldom are samples: model(x, mask).
        self._are_in_list = items is not None or bool(depth)
        by_path = dict[tuple[int, ...], Tensor]()
        if items is not None and len(items) == len(run.inputs):
            self._lists = joinable(run)
            by_path = {given.path: rows for given, rows in zip(run.inputs, items, strict=True)}
        elif depth is not None:
            self._lists = lists_of_kinds(run, depth)
            by_path = {g.path: samples[n, None] for of in self._lists for n, g in enumerate(of)}
        # The tensors that the model received, each with the samples of its rows, or its only one.
        self._owned = [
            (given, by_path.get(given.path, samples))
            for given in run.inputs
            if given.path in by_path or given.shape[run.axis : run.axis + 1] == samples.shape
        ]
        self._rows = {given.path: rows for given, rows in self._owned}

    def ids(self) -> SampleIds | None:
        """The ids, by the first of several ways that finds them: cheap ways come first."""
        ids = self._of_item() if self._lists else self._of_view()
        if ids is None and self._is_readable:
            ids = self._of_copy()
            ids = self._of_joined() if ids is None else ids
            ids = self._of_rows() if ids is None else ids
            ids = self._of_made() if ids is None else ids
        return self._of_lengths() if ids is None and self._are_in_list else ids

    def _of_item(self) -> SampleIds | None:
        """The ids of a view of one tensor of a list, or of another argument."""
        if not has_memory(self._received):
            return None
        memory, first, last = span_of(self._received)
        holders = [
            rows
            for given, rows in self._owned
            if given.span[0] == memory and given.span[1] <= first and last <= given.span[2]
        ]
        if len(holders) != 1:
            return None
        is_item = len(holders[0]) == 1
        return along(holders[0], 0, self._shape) if is_item else self._of_view(holders[0])

    def _of_view(self, rows: Tensor | None = None) -> SampleIds | None:
        """The ids of a view of a tensor whose rows belong to known samples, by its strides."""
        received, rows = self._received, self._samples if rows is None else rows
        layout = self._run.memories.get(memory_of(received)) if has_memory(received) else None
        if layout is None or layout.axis < 0 or layout.shape[layout.axis] != len(rows):
            return None
        axis = layout.axis_in(received)
        if axis is None:
            return _ids_of_view(received, layout, rows)
        return along(rows, axis, self._shape)

    def _of_copy(self) -> SampleIds | None:
        """The ids of a copy of one tensor, with one axis moved anywhere, by values."""
        readings = list[SampleIds]()
        for _, whole, rows in self._given():
            if whole.numel() != len(self._flat):
                continue
            for ends in product(range(whole.dim()), repeat=2):  # first, no axis is moved
                turned = whole.movedim(*ends)
                if turned.flatten().equal(self._flat):
                    self._note(None)
                    ids = along(rows, self._run.axis, tuple(whole.shape)).movedim(*ends)
                    readings.append(viewed(ids, tuple(turned.shape), self._shape, rows))
                    break
        return _same(readings)

    def _of_joined(self) -> SampleIds | None:
        """The ids of several tensors that were joined, stacked or padded, by values."""
        for group, rows in self._joined():
            tensors = [tensor for given in group if (tensor := given.tensor()) is not None]
            if len(tensors) < len(group) or not all(map(self._is_like, tensors)):
                continue
            joined = torch.cat(tensors)
            if joined.flatten().equal(self._flat):
                self._note(None)
                before = tuple(joined.shape)
                return viewed(along(rows, 0, before), before, self._shape, rows)
            for axis in (0, 1) if self._lists else ():
                if self._is_padded(group, axis) and all(
                    row[: len(t)].equal(t)
                    for row, t in zip(self._received.movedim(axis, 0), tensors, strict=True)
                ):
                    self._note(None)
                    return self._of_items(group, axis)
        return None

    def _of_rows(self) -> SampleIds | None:
        """The ids of rows that an index or a mask picked, by values; of floats, seldom equal."""
        for source, picked in self._picks() if self._received.is_floating_point() else ():
            if picked.is_clear:
                self._note(source)
                return picked.ids
        return None

    def _of_made(self) -> SampleIds | None:
        """The ids of rows that were joined or picked from several tensors, by values.

        These are what layers made, and what the model received.
        """
        ids = self._of(self._made[0])
        if ids is not None:
            self._note(None)
        return ids

    def _of(self, made: Sequence[tuple[Sums, SampleIds]]) -> SampleIds | None:
        """The ids of rows, of which each is one of what layers made."""
        data = self._received
        kinds = {(1, 0), *(each[1:] for each, _ in made)}
        for depth, unit in sorted(kinds) if made and has_rows(data) else ():
            is_fit = can_add(data, depth, unit)
            ids = self._among(sums_of(data, depth, unit), made) if is_fit else None
            if ids is not None:
                return ids[(..., *[None] * depth)]
        return None

    @cached_property
    def _made(self) -> tuple[list[tuple[Sums, SampleIds]], list[tuple[Sums, SampleIds]]]:
        """What layers made, with its sample ids; and what they made of rows in unknown order.

        Rows that functions changed are taken to be in order, unless a layer before received rows in
        another one: these may have been put back or not.
        """
        found, doubtful = list[tuple[Sums, SampleIds]](), list[tuple[Sums, SampleIds]]()
        samples, are_in_order = self._samples, True
        for made, source in () if self._lists or self._run.axis else self._run.made:
            shape = tuple(made.rows.shape)
            ids = None if source is None else self._among(source, found)
            if source is None or ids is None:
                if len(made.rows) == len(samples):
                    known = found if source is None or are_in_order else doubtful
                    known.append((made, along(samples, 0, shape)))
                continue
            are_in_order &= bool((ids.flatten().diff() >= 0).all())
            lead = max((k for k, length in enumerate(ids.shape, 1) if length > 1), default=1)
            if shape[:lead] == source.rows.shape[:lead]:
                own = ids.reshape(ids.shape[:lead])
                found.append((made, own[(..., *[None] * (len(shape) - lead))]))
        return found, doubtful

    def _among(self, sums: Sums, made: Sequence[tuple[Sums, SampleIds]]) -> SampleIds | None:
        """The ids of rows, of which each is one of other rows; ``None`` if any is not."""
        shape = sums.rows.shape
        of_same = next((ids for other, ids in made if other is sums), None)
        if of_same is not None or self._lists or self._run.axis:
            return of_same
        known = [(other.rows, ids) for other, ids in made if other[1:] == sums[1:]]
        noted = self._run.sums if isinstance(self._run, ModelRun) else {}
        for given, rows in self._owned:
            whole, of_whole = given.tensor(), noted.get((given.path, *sums[1:]))
            if whole is not None and can_add(whole, *sums[1:]):
                of_whole = sums_of(whole, *sums[1:])
            is_like = sums.unit == WHOLE or given.dtype == self._received.dtype
            if of_whole is not None and is_like:
                known.append((of_whole.rows, along(rows, 0, tuple(of_whole.rows.shape))))
        known = [(whole, ids) for whole, ids in known if whole.device == sums.rows.device]
        as_many = [(whole, ids) for whole, ids in known if whole.numel() == shape.numel()]
        for whole, ids in as_many:
            for ends in product(range(whole.dim()), repeat=2):  # first, no axis is moved
                turned, own = whole.movedim(*ends), ids.movedim(*ends)
                if turned.flatten().equal(sums.rows.flatten()):
                    return viewed(own, tuple(turned.shape), tuple(shape), self._samples)
        for axis in range(1, 1 + len(shape)):
            line, parts = shape[axis:], list[tuple[Tensor, Tensor]]()
            for whole, ids in known:
                lead = whole.dim() - len(line)
                is_fit = lead > 0 and whole.shape[lead:] == line
                if is_fit and ids.shape[lead:].numel() == 1:
                    owners = ids.reshape(ids.shape[:lead]).expand(whole.shape[:lead])
                    parts.append((whole.reshape(-1, *line), owners.flatten()))
            if parts:
                rows, of_rows = map(torch.cat, zip(*parts, strict=True))
                picked = picked_from(rows, sums.rows, of_rows, 1)
                if picked is not None and picked.is_clear:
                    return picked.ids
        return None

    def is_unclear(self) -> bool:
        """Whether it is unknown whose rows are.

        They were picked unevenly, and some rows are equal; or a layer made them of rows that may be
        in order or not.
        """
        if self._is_readable and self._of(self._made[1]) is not None:
            self._note(None)
            return True
        if not any(len(given.shape) > len(self._shape) for given, _ in self._owned):
            return False  # a mask over several axes merges them
        for source, picked in self._picks():
            given = next(given for given, _ in self._owned if given.path == source.path)
            if len(given.shape) - source.axes == len(self._shape) - 1:
                self._note(None)
                if picked.is_uneven:
                    return True
        return False

    def _given(self) -> Iterator[tuple[Place, Tensor, Tensor]]:
        """What the model received and is still there, with its path and the samples of its rows."""
        for given, rows in self._owned:
            whole = given.tensor()
            if whole is not None and self._is_like(whole):
                yield given.path, whole, rows

    def _picks(self) -> Iterator[tuple[Source, Picked]]:
        """The tensors that the model received and that have every row of the data."""
        if not self._is_readable or self._run.axis or not self._shape:
            return
        for path, whole, rows in self._given():
            if len(rows) != len(whole):
                continue
            for axes in range(1, 1 + whole.dim()):
                picked = picked_from(whole, self._received, rows, axes)
                if picked is not None:
                    yield Source(path, axes, picked.rows), picked
                    break

    def _of_lengths(self) -> SampleIds | None:
        """The ids of what was made of a list, if only one reading agrees with the lengths."""
        shape, lists = self._shape, self._lists
        readings = list[SampleIds | None]()
        readings += [along(r, 0, shape) for _, r in self._joined() if shape[:1] == (len(r),)]
        readings += [self._of_items(g, a) for g in lists for a in (0, 1) if self._is_padded(g, a)]
        items = [given.shape for group in lists for given in group]
        is_item = any(s[:1] == shape[:1] and len(s) == len(shape) for s in items)
        if not readings and not is_item:
            nested = [group for group in lists if len(group[0].path) > 1]
            readings = [self._of_items(g, 0) for g in nested if shape[:1] == (len(g),)]
        return _same([ids for ids in readings if ids is not None])

    def _of_items(self, group: list[ModelInput], axis: int) -> SampleIds | None:
        """The ids if an axis has one entry for each tensor; ``None`` if one has several samples."""
        rows = [self._rows.get(given.path, self._samples[:0]) for given in group]
        is_one_each = all(len(own) == 1 for own in rows)
        return along(torch.cat(rows), axis, self._shape) if is_one_each else None

    def _is_padded(self, group: list[ModelInput], axis: int) -> bool:
        """Whether the data have the shape of padded items, stacked on an axis."""
        lengths, (first, *_) = [g.shape[0] for g in group if g.shape], group
        shape = [len(group), max(lengths, default=0)][:: 1 - 2 * axis]
        return len(lengths) == len(group) and self._shape == (*shape, *first.shape[1:])

    def _joined(self) -> Iterator[tuple[list[ModelInput], Tensor]]:
        """Lists of tensors that may have been joined, with the samples of all their rows."""
        # A tensor without samples in front may belong to all of them.
        nobody = torch.full((1,), -1, device="cpu")
        if self._run.axis:
            return
        for group in filter(can_join, self._lists) if self._lists else joinable(self._run):
            rows = [self._rows.get(given.path, nobody).expand(given.shape[0]) for given in group]
            yield group, torch.cat(rows)

    @property
    def _flat(self) -> Tensor:
        return self._received.flatten()

    def _is_like(self, other: Tensor) -> bool:
        received = self._received
        is_like = received.dtype == other.dtype and received.device == other.device
        return is_like and not is_symbolic(other)


def _same(readings: list[SampleIds]) -> SampleIds | None:
    """The ids that all readings agree on; ``None`` if there are none, or they differ."""
    is_clear = bool(readings) and all(readings[0].equal(other) for other in readings)
    return readings[0] if is_clear else None


def _ids_of_view(view: Tensor, layout: SampleLayout, samples: Tensor) -> SampleIds:
    """The ids of a view with any strides: ids are written into a memory of the same layout."""
    ends = [layout, layout_of(view, 0)]
    spans = [sum(s * (n - 1) for n, s in zip(e.shape, e.strides, strict=True)) for e in ends]
    first = min(end.offset for end in ends)
    size = max(end.offset + span for end, span in zip(ends, spans, strict=True)) - first + 1
    memory = torch.full((size,), -1, device="cpu")
    whole, seen = (memory.as_strided(e.shape, e.strides, e.offset - first) for e in ends)
    whole.copy_(along(samples, layout.axis, layout.shape).expand(layout.shape))
    return shortened(seen, samples)
