"""Tells which sample each entry of a tensor belongs to, wherever operations have moved entries.

As ``logits[mask]`` picks tokens, or ``hidden.transpose(0, 1).flatten(0, 1)`` puts time first. The
numbers of the samples are carried from what models received to the tensor in question, by the
operations themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor

from backpack_core._torch import Node, metadata_of
from backpack_core.graph import nodes
from backpack_core.graph.alignment import Place
from backpack_core.graph.batch import declared_axis, is_doubtful
from backpack_core.graph.bridge import push
from backpack_core.graph.of_weights import Origins
from backpack_core.graph.parameters import beside_pass
from backpack_core.graph.paths import entries_of
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.owner import is_parameter

# For each entry of a tensor the sample that it belongs to, -1 for none. An axis along which all
# entries belong to the same has length one.
Numbers: TypeAlias = Tensor
Given: TypeAlias = dict[int, Numbers | None]  # by position of the operand; ``None`` if unknown
Shape: TypeAlias = tuple[int, ...]
Picks: TypeAlias = Sequence[Tensor | None]


class Owners:
    """Knows the samples that entries of tensors belong to; each tensor is looked at once."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._is_table = Origins(survey).of_tables
        self._samples = torch.arange(survey.batch_size, device="cpu")
        self._usual: dict[int, Numbers] = {}  # by number of axes

    def rows(self, node: Node | None, number: int) -> Tensor | None:
        """The sample of each entry of axis 0; ``None`` if that is unknown, or several share one.

        Or if these are all samples in another order: they may be paired with targets of others.
        """
        numbers = None if node is None else self._of((node, number))
        if node is None or numbers is None or not numbers.dim() or _are_elsewhere(numbers):
            return None
        rows = numbers.flatten().expand(nodes.lengths_of(node, number)[:1])
        is_turned = not rows.equal(self._samples) and rows.sort()[0].equal(self._samples)
        return None if is_turned or bool((rows < 0).any()) else rows

    @cached_property
    def are_moved(self) -> bool:
        """Whether rows of anything may be other samples than rows of what the model received."""
        survey, between = self._survey, [node for node, _ in self._survey.seen]
        is_other = survey.is_declared or bool(survey.rows) or any(survey.axes.values())
        return survey.is_readable and (is_other or any(map(self._moves, between)))

    def _moves(self, node: Node) -> bool:
        operation, size = nodes.operation_of(node), self._survey.batch_size
        child, number = node.next_functions[0] if operation in nodes.MOVES else (None, 0)
        if child is None or not size or nodes.keeps_rows(node, 0, 0):
            return False
        if self._are_as_many and operation in nodes.TURNS | nodes.SELECTIONS:
            # Then an axis of another length is nowhere taken for that of the samples.
            place = (node, 0) if operation in nodes.TURNS else (child, number)
            if (nodes.lengths_of(*place) or (1,))[0] % size:
                return False
        return not self._has_none(child)

    @cached_property
    def _are_as_many(self) -> bool:
        """Whether all modules received as many rows as there are samples."""
        survey, known = self._survey, self._survey.received.items()
        return all(size == survey.batch_size for (call, _), size in known if any(call.edges))

    def received_moved(self, call: Call) -> bool:
        """Whether it is known that rows that a call received are not the samples."""
        edge = call.edges[0] if call.edges else None
        numbers = None if edge is None else self._of(edge[:2])
        if edge is None or numbers is None or self._is_along(numbers, self._axis(call, 0)):
            return False
        rows = self.rows(*edge[:2])
        return _are_elsewhere(numbers) or not (rows is None or rows.equal(self._samples))

    def received_elsewhere(self, call: Call) -> bool:
        """Whether what a call received is known to have samples, and rows to be no single one's."""
        edge = call.edges[0] if call.edges and self._survey.is_readable else None
        return edge is not None and self.are_elsewhere(edge[:2])

    def are_elsewhere(self, place: Place) -> bool:
        """Whether a tensor is known to have samples, and rows to be no single one's."""
        numbers = self._of(place)
        return numbers is not None and _are_elsewhere(numbers)

    def _of(self, place: Place) -> Numbers | None:
        known, todo = self._survey.numbers, [place]
        while todo:
            behind = {} if todo[-1] in known else self._operands(todo[-1])
            if new := [operand for operand in behind.values() if operand not in known]:
                todo += new
                continue
            this = todo.pop()
            if this not in known:
                given = {position: known[operand] for position, operand in behind.items()}
                known[this] = self._found(this, given)
        return known[place]

    def _operands(self, place: Place) -> dict[int, Place]:
        """What tells the numbers at a tensor, by position: what has samples; of calls, an input."""
        site = self._call(place)
        if site is None:
            ways = edges_behind(place[0])
            return {i: edge[:2] for i, edge in ways if not self._has_none(edge.node)}
        first = (site.call.edges or (None,))[0]
        return {} if first is None else {0: first[:2]}

    def _call(self, place: Place) -> Site | None:
        """The call that returned a tensor, if its rule tells where samples are in it.

        It does not where they are on another axis: then the nodes inside do.
        """
        site = self._survey.site_at(tuple.__new__(Edge, (*place, 0)))  # the quick way
        if site is None or site.call.goes_inside:
            return None
        first = (site.call.edges or (None,))[0]
        given = None if first is None else self._survey.numbers.get(first[:2])
        if given is None or not _are_elsewhere(given):
            return site
        return site if self._is_along(given, self._axis(*site[:2])) else None

    def _axis(self, call: Call, index: int) -> int:
        """The axis other than the first on which a call is known to have samples; else zero."""
        return declared_axis(call) or self._survey.axes.get((call, index), 0)

    @staticmethod
    def _is_along(numbers: Numbers, axis: int) -> bool:
        return bool(axis) and numbers.shape[axis : axis + 1] == (numbers.numel(),)

    def _has_none(self, node: Node) -> bool:
        """Whether a tensor has no samples: it was made, or picked, of parameters alone."""
        while nodes.operation_of(node) in nodes.PICKS and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        if nodes.is_leaf(node):
            return is_parameter(node.variable) or id(node.variable) in self._survey.uses  # type: ignore[attr-defined]
        return self._is_table(node)

    def _found(self, place: Place, given: Given) -> Numbers | None:
        node, number = place
        shape, rows = nodes.lengths_of(node, number), self._survey.rows.get(node)
        if rows is not None:
            return _along(rows.cpu(), 0, shape)
        if (site := self._call(place)) is not None:
            return self._of_call(site, given.get(0), shape)
        if nodes.is_leaf(node):
            return self._of_data(shape, 0)
        if self._keeps(node, number, given, shape):
            return self._first(len(shape))
        return _made(node, number, given)

    def _keeps(self, node: Node, number: int, given: Given, shape: Shape) -> bool:
        """Whether all operands have the samples in front, and so has the result: the usual case."""
        is_there = bool(given) and shape[:1] == (self._survey.batch_size,)
        return is_there and all(
            n is not None
            and n is self._usual.get(n.dim())
            and nodes.keeps_rows(node, number, position)
            for position, n in given.items()
        )

    def _first(self, count: int) -> Numbers:
        """The numbers of a tensor of so many axes that has the samples in front."""
        if count not in self._usual:
            self._usual[count] = _along(self._samples, 0, (0,) * count)
        return self._usual[count]

    def _of_call(self, site: Site, given: Numbers | None, shape: Shape) -> Numbers | None:
        """A module keeps rows where they are, or returns samples where its rule says."""
        call, axis = site.call, self._survey.axes.get((site.call, site.index), 0)
        if call.is_released or call.rule.is_loss or not call.stored.inputs:
            return None
        received, declared = call.stored.inputs[0], declared_axis(call)
        if given is None and not any(call.edges[:1]):
            given = self._of_data(tuple(received.shape), declared, call.receives_input > 1)
        if given is None or given.numel() != max(given.shape, default=0):
            return None
        before = next((k for k, length in enumerate(given.shape) if length > 1), declared)
        axis = axis or (before if before == declared else 0)
        is_there = axis >= before and shape[axis : axis + 1] == received.shape[before : before + 1]
        if not is_there:
            return None
        is_usual = not axis and given is self._usual.get(given.dim())
        return self._first(len(shape)) if is_usual else _along(given.flatten(), axis, shape)

    def _of_data(self, shape: Shape, axis: int, is_sure: bool = False) -> Numbers | None:
        """Of what is known by its lengths only; and the axis that is declared for samples."""
        samples = self._survey.batch_size
        is_known = is_sure or axis or not is_doubtful(shape, samples)
        if not is_known or shape[axis : axis + 1] != (samples,):
            return None
        return _along(self._samples, axis, shape) if axis else self._first(len(shape))


def turns_of(survey: Survey, loss: Call) -> Tensor:
    """A number for each row that a loss received; the rows of one sample have different numbers.

    Rows with one number share a column, as no two of them belong to one sample.
    """
    edge, rows, owners = loss.edges[0], torch.arange(loss.stored.inputs[0].shape[0], device="cpu"), None
    if edge is not None and survey.is_readable:
        owners = Owners(survey).rows(edge.node, edge.output_nr)
    if owners is None:
        return rows % entries_of(survey, loss)
    order, counts = owners.argsort(stable=True), owners.bincount()
    turns = torch.empty_like(owners)
    turns[order] = rows - (counts.cumsum(0) - counts)[owners[order]]
    return turns


def _are_elsewhere(numbers: Numbers) -> bool:
    return numbers.shape[1:].numel() != 1


# Through operations ------------------------------------------------------------------------------


def _made(node: Node, number: int, given: Given) -> Numbers | None:
    """What an operation makes of the numbers at its operands; ``None`` where samples may meet."""
    shape, operation = nodes.lengths_of(node, number), nodes.operation_of(node)
    known = {position: n for position, n in given.items() if n is not None}
    if operation in nodes.ELEMENTWISE and known:
        return _met(known, [_behind(node, i) for i in given.keys() - known.keys()], shape)
    if operation not in nodes.VIEWS:  # of operands that do not keep rows, the dye will tell
        kept = [n for i, n in given.items() if nodes.keeps_rows(node, number, i)]
        rows = [n for n in kept if n is not None and not _are_elsewhere(n)]
        if rows and len(rows) == len(kept) and all(n.equal(rows[0]) for n in rows):
            return _along(rows[0].flatten(), 0, shape)
    if not known or len(known) < len(given):
        return None
    position, first = next(iter(known.items()))
    along = nodes.axes_along(node, first.dim())
    is_free = all(first.shape[axis] == 1 for axis in along)
    if along and is_free and all(n.equal(first) for n in known.values()):
        return first.squeeze(along[0]) if operation in nodes.SELECTIONS else first
    if first.numel() == 1 and all(n.flatten().equal(first.flatten()) for n in known.values()):
        return _along(first.flatten(), 0, shape)  # all of it is of one sample
    if operation in nodes.VIEWS or nodes.hands_on(node):
        return _viewed(first, _behind(node, position), shape)
    if operation in nodes.INDEXED:
        return _picked(first, nodes.picks_of(node), _behind(node, position))
    if operation in nodes.TURNS:
        return first.permute(nodes.order_of(node, len(shape)))
    return _carried(node, number, known) if operation in nodes.LINEAR else None


def _behind(node: Node, position: int) -> Shape:
    """The shape of an operand."""
    child, number = node.next_functions[position]
    return () if child is None else nodes.lengths_of(child, number)


def _along(rows: Tensor, axis: int, shape: Shape) -> Numbers:
    """The numbers of a tensor that has them along one axis."""
    return rows.reshape([-1 if k == axis else 1 for k in range(len(shape))]) if shape else rows[0]


def _shortened(numbers: Tensor) -> Numbers:
    """Numbers with length one along each axis where they are all the same."""
    for axis, length in enumerate(numbers.shape):
        first = numbers.narrow(axis, 0, min(1, length))
        if length > 1 and bool((numbers == first).all()):
            numbers = first
    return numbers


def _viewed(numbers: Numbers, before: Shape, after: Shape) -> Numbers:
    """In the same order of entries: as many leading axes as have different numbers."""
    sizes = [torch.Size(after[:count]).numel() for count in range(len(after) + 1)]
    lead = max((axis + 1 for axis, length in enumerate(numbers.shape) if length != 1), default=0)
    while torch.Size(before[:lead]).numel() not in sizes:
        lead += 1
    count = sizes.index(torch.Size(before[:lead]).numel())
    whole = numbers[(..., *[0] * (numbers.dim() - lead))].expand(before[:lead])
    return _shortened(whole.reshape(after[:count])[(..., *[None] * (len(after) - count))])


def _met(known: dict[int, Numbers], others: list[Shape], shape: Shape) -> Numbers | None:
    """What entries have that were computed from one entry of each operand."""
    wide = [n[(*[None] * (len(shape) - n.dim()), ...)] for n in known.values()]
    parts = torch.broadcast_tensors(*wide)
    found = torch.stack(parts).amax(0)
    if any(bool(((part != found) & (part >= 0)).any()) for part in parts):
        return None
    # What nothing is known of may be anybody's, unless all samples have the same.
    for other in others:
        lengths = (*[1] * (len(shape) - len(other)), *other)
        if any(length != 1 for length, n in zip(lengths, found.shape, strict=True) if n != 1):
            return None
    return found


def _picked(numbers: Numbers, picks: Picks, before: Shape) -> Numbers:
    """What indices of leading axes pick; ``None`` among them keeps an axis."""
    count = sum(pick.dim() if pick is not None and _is_mask(pick) else 1 for pick in picks)
    lead = numbers.expand(*before[:count], *numbers.shape[count:])
    chosen = tuple(slice(None) if pick is None else pick.cpu() for pick in picks)
    return _shortened(lead[chosen])


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _carried(node: Node, number: int, given: dict[int, Numbers]) -> Numbers | None:
    """What a linear operation makes of numbers, which are sent through it.

    No coefficient of these operations is negative. So where entries of one sample were added up,
    the number comes as many times as a one does. Other numbers, at random, tell if that is so.
    """
    metadata = metadata_of(node, number)
    if metadata.dtype.is_complex or not all(n.numel() for n in given.values()):
        return None
    base = int(torch.finfo(metadata.dtype).eps ** -0.5)  # so that sums are exact
    most = max(int(n.max()) for n in given.values())
    codes = torch.randint(base, (most + 1,), generator=_generator(), device="cpu")
    powers = [base**k for k in range(64) if not k or base**k <= most]
    marks: list[Callable[[Tensor], Tensor]] = [torch.ones_like, codes.__getitem__]
    marks += [partial(_digit, power, base) for power in powers]
    behind = [child for child, _ in node.next_functions if child is not None]
    sent = partial(_sent, node, number, given, marks)
    ones, checks, *digits = beside_pass(sent, behind, metadata.device)
    is_some, ones = ones > 0, torch.where(ones > 0, ones, 1)
    found = torch.zeros_like(ones, dtype=torch.long)
    for power, digit in zip(powers, digits, strict=True):
        found += (digit / ones).round().long() * power
    found = found.clamp(0, most)
    if ((checks - codes[found] * ones).abs() > ones / 4)[is_some].any():
        return None
    return _shortened(torch.where(is_some, found, -1))


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _digit(power: int, base: int, numbers: Tensor) -> Tensor:
    return numbers // power % base


def _sent(
    node: Node, number: int, given: dict[int, Numbers], marks: list[Callable[[Tensor], Tensor]]
) -> list[Tensor]:
    """What the operation makes of marks: the transpose of what its node sends back."""
    metadata, found = metadata_of(node, number), []
    with torch.enable_grad():
        w = torch.ones(1, *metadata.shape, dtype=metadata.dtype, device=metadata.device)
        image = push(node, {number: w.requires_grad_()})
        ends = {i: mat for i, mat in image.items() if i in given and mat.requires_grad}
        for mark in marks:
            shown = [torch.where(given[i] < 0, 0, mark(given[i].clamp(min=0))) for i in ends]
            full = [m.to(mat).expand_as(mat) for m, mat in zip(shown, ends.values(), strict=True)]
            (result,) = torch.autograd.grad([*ends.values()], w, full, retain_graph=True)
            found += (result[0].cpu(),)
    return found
