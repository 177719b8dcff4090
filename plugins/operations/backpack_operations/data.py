"""Tells the samples of data that a module received and no graph made, by what the model received.

Samples are on axis 0 of each tensor that the model received; or each item of a list is one
sample's, which ``parts.py`` finds out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from backpack_core._torch import has_memory, memory_of
from backpack_core.record.call import Call
from backpack_core.record.run import ModelInput, Run, SampleLayout, layout_of, span_of
from backpack_operations.moves import Numbers, Shape, along, shortened, viewed
from backpack_products.values import is_symbolic


def of_data(
    data: Tensor,
    run: Run,
    samples: Tensor,
    depth: int | None = None,
    items: Sequence[Tensor] | None = None,
    is_readable: bool = True,
) -> Numbers | None:
    """The samples of data that are used in a run of a model, as far as what it received tells.

    Of a view, strides tell, also of what layers without a graph have made of it. Where a copy has
    another order, as ``x.transpose(0, 1).reshape(-1, D)``, or several tensors were joined, the
    values do.

    Args:
        data: The data.
        run: The run.
        samples: The sample of each row that the model received.
        depth: At which depth of what the model received each item is one sample's, if any is.
        items: For each tensor that it received the samples of its rows, or the only one, where the
            user says so.
        is_readable: Whether their numbers may be compared.
    """
    return _Data(data, run, samples, depth, items, is_readable).numbers()


def is_unclear(data: Tensor, run: Run, samples: Tensor) -> bool:
    """Whether rows were picked unevenly from what a model received, and it is not known whose.

    Args:
        data: What a module received, of which :func:`of_data` knows nothing.
        run: The run.
        samples: The sample of each row that the model received.
    """
    return _Data(data, run, samples, None, None, is_readable=True).is_unclear()


class Picked(NamedTuple):
    """Rows that are some of those of another tensor.

    Attributes:
        numbers: The sample of each, by the first row that is equal.
        is_clear: Whether equal rows are of one sample, everywhere.
        is_out_of_order: Whether they are in the order of the tensor, and cannot be as many rows of
            each sample.
    """

    numbers: Numbers
    is_clear: bool
    is_out_of_order: bool


def picked_from(whole: Tensor, data: Tensor, owners: Tensor, axes: int) -> Picked | None:
    """Rows that were picked from a tensor; ``None`` if any is none of its rows, or all are equal.

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
    known, seen = whole.reshape(-1, line.numel()), data.reshape(-1, line.numel())
    if bool((seen == seen[:1]).all()) or not bool((known == seen[:1]).all(1).any()):
        return None
    _, kinds = torch.cat([known, seen]).unique(dim=0, return_inverse=True)
    of_known, of_seen = kinds.cpu().split([len(known), len(seen)])
    owners = owners.repeat_interleave(len(known) // len(owners))
    nobody, count = int(owners.max()) + 1, int(kinds.max()) + 1
    first = torch.full((count,), nobody, device="cpu").scatter_reduce(0, of_known, owners, "amin")
    last = torch.full((count,), -1, device="cpu").scatter_reduce(0, of_known, owners, "amax")
    if bool((last[of_seen] < 0).any()):
        return None
    numbers = first[of_seen].reshape(*lead, *[1] * len(line))
    for axis in range(1, len(lead)):  # along which all are one sample's
        one = numbers.narrow(axis, 0, 1)
        numbers = one if bool((numbers == one).all()) else numbers
    is_clear = bool((first == last)[of_seen].all())
    return Picked(numbers, is_clear, _are_out_of_order(of_known, of_seen, owners))


def _are_out_of_order(known: Tensor, seen: Tensor, owners: Tensor) -> bool:
    """Whether rows stand in the order of those they were picked from, but not evenly.

    Args:
        known: Which rows are equal, of those that they were picked from.
        seen: The same, of themselves.
        owners: The sample of each of the former.
    """
    samples, left = int(owners.max()) + 1, iter(known.tolist())
    if not all(kind in left for kind in seen.tolist()):
        return False
    share, rest = divmod(len(seen), samples)
    has = torch.zeros(samples, int(known.max()) + 1, dtype=torch.bool, device="cpu")
    has[owners, known] = True
    in_order = torch.arange(samples, device="cpu").repeat_interleave(share)
    return bool(rest) or not bool(has[in_order, seen].all())


class _Data:
    """Data, beside what the model received."""

    def __init__(
        self,
        data: Tensor,
        run: Run,
        samples: Tensor,
        depth: int | None,
        items: Sequence[Tensor] | None,
        is_readable: bool,
    ) -> None:
        self._received, self._run = data, run
        self._shape: Shape = tuple(data.shape)
        self._is_readable = is_readable and has_memory(data) and not is_symbolic(data)
        self._samples, self._groups = samples, list[list[ModelInput]]()
        known = dict[tuple[int, ...], Tensor]()
        if items is not None and len(items) == len(run.inputs):
            self._groups = joinable(run)
            known = {given.path: rows for given, rows in zip(run.inputs, items, strict=True)}
        elif depth is not None:
            self._groups = groups(run, depth)
            known = {g.path: samples[n, None] for of in self._groups for n, g in enumerate(of)}
        # Given tensors, each with the samples of its rows, or with the only one.
        self._told = [
            (given, known.get(given.path, samples))
            for given in run.inputs
            if given.path in known or given.shape[run.axis : run.axis + 1] == samples.shape
        ]

    def numbers(self) -> Numbers | None:
        """The samples of entries, by whatever tells."""
        found = self._of_item() if self._groups else self._of_view()
        if found is None and self._is_readable:
            found = self._of_copy()
            found = self._of_joined() if found is None else found
            found = self._of_rows() if found is None else found
        return self._of_lengths() if found is None and self._groups else found

    def _of_item(self) -> Numbers | None:
        """Of a view of an item, or of something beside the items."""
        if not has_memory(self._received):
            return None
        memory, first, last = span_of(self._received)
        holders = [
            rows
            for given, rows in self._told
            if given.span[0] == memory and given.span[1] <= first and last <= given.span[2]
        ]
        if len(holders) != 1:
            return None
        is_item = len(holders[0]) == 1
        return along(holders[0], 0, self._shape) if is_item else self._of_view(holders[0])

    def _of_view(self, rows: Tensor | None = None) -> Numbers | None:
        """Of a view of something whose rows are of known samples."""
        received, rows = self._received, self._samples if rows is None else rows
        layout = self._run.memories.get(memory_of(received)) if has_memory(received) else None
        if layout is None or layout.axis < 0 or layout.shape[layout.axis] != len(rows):
            return None
        axis = layout.axis_in(received)
        if axis is None:
            return _seen_through(received, layout, rows)
        return along(rows, axis, self._shape)

    def _of_copy(self) -> Numbers | None:
        """Of a copy of one tensor, with its axes in any order."""
        found = list[Numbers]()
        for given, rows in self._told:
            whole = given.tensor()
            if whole is None or not self._is_like(whole) or whole.numel() != len(self._flat):
                continue
            for axis in range(whole.dim()):
                turned = whole.movedim(0, axis)
                if turned.flatten().equal(self._flat):
                    numbers = along(rows, self._run.axis, given.shape).movedim(0, axis)
                    found.append(viewed(numbers, tuple(turned.shape), self._shape, rows))
                    break
        is_clear = bool(found) and all(found[0].equal(other) for other in found)
        return found[0] if is_clear else None

    def _of_joined(self) -> Numbers | None:
        """Of several tensors that were joined or stacked; of items, also padded."""
        for group, rows in self._joined():
            tensors = [tensor for given in group if (tensor := given.tensor()) is not None]
            if len(tensors) < len(group) or not all(map(self._is_like, tensors)):
                continue
            joined = torch.cat(tensors)
            if joined.flatten().equal(self._flat):
                before = tuple(joined.shape)
                return viewed(along(rows, 0, before), before, self._shape, rows)
            for axis in (0, 1) if self._groups else ():
                if self._is_padded(group, axis) and all(
                    row[: len(t)].equal(t)
                    for row, t in zip(self._received.movedim(axis, 0), tensors, strict=True)
                ):
                    return self._of_items(group, axis)
        return None

    def _of_rows(self) -> Numbers | None:
        """Of rows that an index, a mask or an order has picked; a table may have equal integers."""
        for picked in self._picks() if self._received.is_floating_point() else ():
            if picked.is_clear:
                return picked.numbers
        return None

    def is_unclear(self) -> bool:
        """Whether rows were picked unevenly, and equal ones of several samples hide whose."""
        if not any(len(given.shape) > len(self._shape) for given, _ in self._told):
            return False  # a pick by a mask merges axes
        return any(picked.is_out_of_order for picked in self._picks())

    def _picks(self) -> Iterator[Picked]:
        """The readings by which every row of it is one of what the model received."""
        if not self._is_readable or self._run.axis or not self._shape:
            return
        for given, rows in self._told:
            whole = given.tensor()
            if whole is None or not self._is_like(whole) or len(rows) != len(whole):
                continue
            for axes in range(1, 1 + whole.dim()):
                found = picked_from(whole, self._received, rows, axes)
                if found is not None:
                    yield found
                    break

    def _of_lengths(self) -> Numbers | None:
        """Of what was made of the items, as far as lengths tell one reading."""
        shape, groups = self._shape, self._groups
        found = list[Numbers | None]()
        found += [along(r, 0, shape) for _, r in self._joined() if shape[:1] == (len(r),)]
        found += [self._of_items(g, a) for g in groups for a in (0, 1) if self._is_padded(g, a)]
        items = [given.shape for group in groups for given in group]
        is_item = any(s[:1] == shape[:1] and len(s) == len(shape) for s in items)
        if not found and not is_item:
            lists = [group for group in groups if len(group[0].path) > 1]
            found = [self._of_items(g, 0) for g in lists if shape[:1] == (len(g),)]
        readings = [numbers for numbers in found if numbers is not None]
        is_clear = bool(readings) and all(readings[0].equal(other) for other in readings)
        return readings[0] if is_clear else None

    def _of_items(self, group: list[ModelInput], axis: int) -> Numbers | None:
        """Of one row for each item; ``None`` where an item is of several samples."""
        known = {given.path: rows for given, rows in self._told}
        rows = [known[given.path] for given in group if len(known.get(given.path, ())) == 1]
        return along(torch.cat(rows), axis, self._shape) if len(rows) == len(group) else None

    def _is_padded(self, group: list[ModelInput], axis: int) -> bool:
        """Whether it is as long as items that were padded, and has them on an axis."""
        lengths, (first, *_) = [g.shape[0] for g in group if g.shape], group
        shape = [len(group), max(lengths, default=0)][:: 1 - 2 * axis]
        return len(lengths) == len(group) and self._shape == (*shape, *first.shape[1:])

    def _joined(self) -> Iterator[tuple[list[ModelInput], Tensor]]:
        """Groups of tensors that may have been joined, with the samples of the rows."""
        known = {given.path: rows for given, rows in self._told}
        # What has no samples in front, may be all samples'.
        nobody = torch.full((1,), -1, device="cpu")
        if self._run.axis:
            return
        for group in filter(_can_join, self._groups) if self._groups else joinable(self._run):
            rows = [known.get(given.path, nobody).expand(given.shape[0]) for given in group]
            yield group, torch.cat(rows)

    @property
    def _flat(self) -> Tensor:
        return self._received.flatten()

    def _is_like(self, other: Tensor) -> bool:
        received = self._received
        is_like = received.dtype == other.dtype and received.device == other.device
        return is_like and not is_symbolic(other)


def _seen_through(view: Tensor, layout: SampleLayout, samples: Tensor) -> Numbers:
    """The samples of the entries of a view, as of numbers in a memory of the same layout."""
    ends = [layout, layout_of(view, 0)]
    spans = [sum(s * (n - 1) for n, s in zip(e.shape, e.strides, strict=True)) for e in ends]
    first = min(end.offset for end in ends)
    size = max(end.offset + span for end, span in zip(ends, spans, strict=True)) - first + 1
    memory = torch.full((size,), -1, device="cpu")
    whole, seen = (memory.as_strided(e.shape, e.strides, e.offset - first) for e in ends)
    whole.copy_(along(samples, layout.axis, layout.shape).expand(layout.shape))
    return shortened(seen, samples)


def lists(run: Run, depth: int) -> list[list[ModelInput]]:
    """Tensors whose paths differ at one depth only: those in a list, or in items of one."""
    found = defaultdict[tuple[int, ...], list[ModelInput]](list)
    for given in run.inputs if len(run.inputs) > 1 and not run.axis else ():
        if len(given.path) > depth:
            found[given.path[:depth] + given.path[depth + 1 :]].append(given)
    return [several for several in found.values() if len(several) > 1]


def groups(run: Run, depth: int) -> list[list[ModelInput]]:
    """The same of one kind each: an index beside them in the list is none of them."""
    found = []
    for several in lists(run, depth):
        kinds = [(given.dtype, len(given.shape)) for given in several]
        for kind in dict.fromkeys(kinds):
            found.append([g for g, own in zip(several, kinds, strict=True) if own == kind])
    # Arguments are seldom samples: those of several shapes are different things of each.
    return [g for g in found if len(g) > 1 and (len(g[0].path) > 1 or _can_join(g))]


def joinable(run: Run) -> list[list[ModelInput]]:
    """The lists of tensors that a model received, and may have joined."""
    depths = range(max((len(given.path) for given in run.inputs), default=0))
    return [several for depth in depths for several in lists(run, depth) if _can_join(several)]


def _can_join(group: list[ModelInput]) -> bool:
    """Whether several tensors have one shape but for axis 0."""
    return all(given.shape for given in group) and len({given.shape[1:] for given in group}) == 1


def is_packed(call: Call) -> bool:
    """Whether a module received sequences that say by themselves where samples are."""
    return any(isinstance(given, PackedSequence) for given in call.stored.args)


def lengths_of(call: Call) -> set[int]:
    """How long tensors of a list are, if a module received as many rows as all of them together."""
    if is_packed(call):
        return set()
    rows = call.stored.inputs[0].shape[:1].numel()
    lists = [[given.shape[0] for given in several] for several in joinable(call.run)]
    return {n for lengths in lists if sum(lengths) == rows for n in lengths}
