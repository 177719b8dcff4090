"""Tells the samples of data that a module received and no graph made, by what the model received.

Samples are on axis 0 of each tensor that the model received; or each item of a list is one
sample's, which ``parts.py`` finds out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from backpack_core._torch import has_memory, is_symbolic, memory_of
from backpack_core.graph.moves import Numbers, Shape, along, viewed
from backpack_core.record.call import Call
from backpack_core.record.owner import Given, Run, span_of


def of_data(call: Call, samples: Tensor, depth: int | None) -> Numbers | None:
    """The samples of data that a module received, as far as what the model received tells.

    Of a view, strides tell. Where axes were merged, as in ``x.flatten(0, 1)``, a copy has another
    order, as ``x.transpose(0, 1).reshape(-1, D)``, or several tensors were joined, the values do.

    Args:
        call: The call of the module.
        samples: The numbers of the samples.
        depth: At which depth of what the model received each item is one sample's, if any is.
    """
    return of_tensor(call.stored.inputs[0], call.run, samples, depth, call.is_readable)


def of_tensor(
    received: Tensor, run: Run, samples: Tensor, depth: int | None, is_readable: bool = True
) -> Numbers | None:
    """The samples of data that are used in a run of a model; see :func:`of_data`."""
    return _Data(received, run, samples, depth, is_readable).numbers()


class _Data:
    """What a module received, beside what the model received."""

    def __init__(
        self, received: Tensor, run: Run, samples: Tensor, depth: int | None, is_readable: bool
    ) -> None:
        self._received, self._run = received, run
        self._shape: Shape = tuple(received.shape)
        self._is_readable = is_readable and not is_symbolic(received)
        self._samples, self._groups = samples, [] if depth is None else run.groups(depth)
        items = {given.path: n for group in self._groups for n, given in enumerate(group)}
        # Given tensors, each with the samples of its rows, or with the only one.
        self._told = [
            (given, samples[items[given.path], None] if given.path in items else samples)
            for given in run.given
            if given.path in items or given.shape[run.axis : run.axis + 1] == samples.shape
        ]

    def numbers(self) -> Numbers | None:
        """The samples of entries, by whatever tells."""
        found = self._of_item() if self._groups else self._of_view()
        if found is None and self._is_readable:
            found = self._of_copy()
            found = self._of_joined() if found is None else found
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
        is_item = len(holders) == 1 and len(holders[0]) == 1
        if is_item or len(holders) != 1:
            return along(holders[0], 0, self._shape) if is_item else None
        return self._of_view()

    def _of_view(self) -> Numbers | None:
        """Of a view of something that has samples in front."""
        memories, received = self._run.memories, self._received
        if not has_memory(received) or memory_of(received) not in memories:
            return None
        wanted = len(self._samples), memories[memory_of(received)]
        ways = enumerate(zip(self._shape, received.stride(), strict=True))
        axis = next((axis for axis, way in ways if way == wanted), None)
        return None if axis is None else along(self._samples, axis, self._shape)

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
                    found.append(viewed(numbers, tuple(turned.shape), self._shape))
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
                return viewed(along(rows, 0, before), before, self._shape)
            for axis in (0, 1) if self._groups else ():
                if self._is_padded(group, axis) and all(
                    row[: len(t)].equal(t)
                    for row, t in zip(self._received.movedim(axis, 0), tensors, strict=True)
                ):
                    return along(self._samples, axis, self._shape)
        return None

    def _of_lengths(self) -> Numbers | None:
        """Of what was made of the items, as far as lengths tell one reading."""
        shape, samples = self._shape, self._samples
        found = [(0, rows) for _, rows in self._joined() if shape[:1] == (len(rows),)]
        found += [(a, samples) for g in self._groups for a in (0, 1) if self._is_padded(g, a)]
        items = [given.shape for group in self._groups for given in group]
        is_item = any(s[:1] == shape[:1] and len(s) == len(shape) for s in items)
        if not found and shape[:1] == samples.shape and not is_item:
            found.append((0, samples))
        readings = [along(rows, axis, shape) for axis, rows in found]
        is_clear = bool(readings) and all(readings[0].equal(other) for other in readings)
        return readings[0] if is_clear else None

    def _is_padded(self, group: list[Given], axis: int) -> bool:
        """Whether it is as long as items that were padded, and has them on an axis."""
        lengths, (first, *_) = [g.shape[0] for g in group if g.shape], group
        shape = [len(group), max(lengths, default=0)][:: 1 - 2 * axis]
        return len(lengths) == len(group) and self._shape == (*shape, *first.shape[1:])

    def _joined(self) -> Iterator[tuple[list[Given], Tensor]]:
        """Groups of tensors that may have been joined, with the samples of the rows."""
        known = {given.path: rows for given, rows in self._told}
        nobody = torch.full((1,), -1)  # what has no samples in front, may be all samples'
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


def joinable(run: Run) -> list[list[Given]]:
    """The lists of tensors that a model received, and may have joined."""
    depths = range(max((len(given.path) for given in run.given), default=0))
    return [several for depth in depths for several in run.lists(depth) if _can_join(several)]


def _can_join(group: list[Given]) -> bool:
    """Whether several tensors have one shape but for axis 0."""
    return all(given.shape for given in group) and len({given.shape[1:] for given in group}) == 1


def lengths_of(call: Call) -> set[int]:
    """How long tensors of a list are, if a module received as many rows as all of them together."""
    if any(isinstance(given, PackedSequence) for given in call.stored.args):
        return set()  # which says by itself where samples are
    rows = call.stored.inputs[0].shape[:1].numel()
    lists = [[given.shape[0] for given in several] for several in joinable(call.run)]
    return {n for lengths in lists if sum(lengths) == rows for n in lengths}
