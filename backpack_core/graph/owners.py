"""Tells which sample each entry of a tensor belongs to, wherever operations have moved entries.

As ``logits[mask]`` picks tokens, or ``hidden.transpose(0, 1).flatten(0, 1)`` puts time first. The
numbers of the samples are carried from what models received to the tensor in question, by the
operations themselves.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from backpack_core._torch import Node, has_memory, is_symbolic, memory_of
from backpack_core.graph import nodes
from backpack_core.graph.alignment import Place
from backpack_core.graph.batch import declared_axis, is_doubtful
from backpack_core.graph.moves import Given, Numbers, Shape, along, are_elsewhere, made, viewed
from backpack_core.graph.of_weights import Origins
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.owner import is_parameter


class Owners:
    """Knows the samples that entries of tensors belong to; each tensor is looked at once."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._is_table = Origins(survey).of_tables
        self._data: dict[Call, Numbers | None] = {}

    @cached_property
    def _samples(self) -> Tensor:
        return torch.arange(self._survey.batch_size, device="cpu")

    def rows(self, node: Node | None, number: int, is_free: bool | None = None) -> Tensor | None:
        """The sample of each entry of axis 0; ``None`` if that is unknown, or several share one.

        Or if it may be by order all the same: where entries of one sample stand among some of
        nobody, or all samples in another order, which may be paired with targets of others.

        Args:
            node: What made the tensor.
            number: Which of its outputs that is.
            is_free: Whether nothing says that entries are by order. Default: as the walk has found.
        """
        if node is None:
            return None
        if is_free is None:
            is_free = (node, number) in self._survey.alignment.owned
        return self._rows(self._of((node, number)), nodes.lengths_of(node, number), is_free)

    def _rows(self, numbers: Numbers | None, shape: Shape, is_free: bool) -> Tensor | None:
        if numbers is None or not numbers.dim() or are_elsewhere(numbers):
            return None
        rows, known = numbers.flatten().expand(shape[:1]), numbers[numbers >= 0]
        if len(known) < numbers.numel():
            return known[:1].expand(shape[:1]) if is_free and len(known.unique()) == 1 else None
        is_turned = not rows.equal(self._samples) and rows.sort()[0].equal(self._samples)
        return None if is_turned and not is_free else rows

    @property
    def are_moved(self) -> bool:
        """Whether rows of anything may be other samples than rows of what the model received."""
        survey = self._survey
        if survey.are_moved is None:  # it is found out while calls have their tensors
            is_other = survey.is_declared or bool(survey.rows) or any(survey.axes.values())
            is_other = is_other or any(self._moves(node) for node, _ in survey.seen)
            is_other = is_other or any(self._is_moved(site.call) for site in survey.unusual)
            survey.are_moved = is_other and survey.is_readable and self._are_known
        return survey.are_moved

    def _is_moved(self, call: Call) -> bool:
        """Whether a module received data in another order than the model did."""
        is_other = call.is_released or call.rule.is_loss or any(call.edges[:1])
        numbers, size = None if is_other else self._of_input(call), self._survey.batch_size
        if numbers is None or not size or self._is_along(numbers, self._axis(call, 0)):
            return False
        rows = self._rows(numbers, tuple(call.stored.inputs[0].shape), is_free=False)
        return rows is None or not rows.equal(self._samples.repeat_interleave(len(rows) // size))

    def _of_input(self, call: Call) -> Numbers | None:
        """Of data that a module received; each call is asked once."""
        if call not in self._data:
            sizes = [t.shape[:1].numel() for t in call.stored.inputs[:1]]
            is_usual = not sizes or (call.receives_input > 1 and sizes == [len(self._samples)])
            self._data[call] = None if is_usual else of_data(call, self._samples)
        return self._data[call]

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
        if edge is None:
            return self._is_moved(call)
        numbers = self._of(edge[:2])
        if numbers is None or self._is_along(numbers, self._axis(call, 0)):
            return False
        rows = self.rows(*edge[:2], is_free=True)
        return are_elsewhere(numbers) or not (rows is None or rows.equal(self._samples))

    def received_elsewhere(self, call: Call) -> bool:
        """Whether what a call received is known to have samples, and rows to be no single one's."""
        edge = call.edges[0] if call.edges else None
        if edge is None or not self._survey.is_readable:
            return False
        return self.are_elsewhere(edge[:2])

    def are_elsewhere(self, place: Place) -> bool:
        """Whether a tensor is known to have samples, and rows to be no single one's."""
        numbers = self._of(place)
        return numbers is not None and are_elsewhere(numbers)

    def meet_in(self, node: Node) -> bool:
        """Whether a number is no sum of several that samples share, as their product or ratio.

        A function of a single one is that sum rescaled: each sample has its part of it.
        """
        numbers = [
            child
            for child, number in node.next_functions
            if child is not None
            and not nodes.lengths_of(child, number)
            and not self._has_none(child)
        ]
        is_one = len(numbers) < 2 and nodes.operation_of(node) not in nodes.SPREADS
        if is_one or nodes.is_linear(node, {*numbers}):
            return False
        found = self._of((node, 0))
        if found is None:
            return not self._is_of_function((node, 0))
        return found.numel() > 1  # else all of it is of one sample

    def _is_of_function(self, place: Place) -> bool:
        """Whether numbers are unknown since a Python function stands before them."""
        known, todo, seen = self._survey.numbers, [place], set[Place]()
        while todo:
            this = todo.pop()
            if this in seen or known.get(this) is not None:
                continue
            if nodes.is_function(this[0]) and not nodes.hands_on(this[0]):
                return True
            seen.add(this)
            todo += self._operands(this).values()
        return False

    @cached_property
    def _are_known(self) -> bool:
        """Whether tensors have numbers."""
        alive = (place for place in self._survey.sites if not place[0].is_released)
        shown = (call.stored.outputs[index] for call, index in alive)
        return not any(map(is_symbolic, shown))

    def _of(self, place: Place) -> Numbers | None:
        known, todo = self._survey.numbers, [place]
        if not self._are_known:
            return None
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
        site = self._site(place)
        given = None if site is None else self._received(site.call)
        if site is None or given is None or not are_elsewhere(given):
            return site
        return site if self._is_along(given, self._axis(*site[:2])) else None

    def _received(self, call: Call) -> Numbers | None:
        """What is known by now of the first input of a call."""
        first = (call.edges or (None,))[0]
        return None if first is None else self._survey.numbers.get(first[:2])

    def _site(self, place: Place) -> Site | None:
        """The call that returned a tensor, if it has a rule for propagation."""
        site = self._survey.site_at(tuple.__new__(Edge, (*place, 0)))  # the quick way
        return None if site is None or site.call.goes_inside else site

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
            leaf = node.variable  # type: ignore[attr-defined]
            return is_parameter(leaf) or not leaf.dim() or id(leaf) in self._survey.uses
        return self._is_table(node)

    def _found(self, place: Place, given: Given) -> Numbers | None:
        node, number = place
        shape, rows = nodes.lengths_of(node, number), self._survey.rows.get(node)
        if rows is not None:
            return along(rows.cpu(), 0, shape)
        if (site := self._call(place)) is not None:
            return self._of_call(site, given.get(0), shape)
        if nodes.is_leaf(node):
            return self._of_data(shape, 0)
        found = made(node, number, given, self._survey.batch_size, self._survey.is_readable)
        if found is None and (site := self._site(place)) is not None:
            # No module is known to move samples to another axis.
            found = self._of_call(site, self._received(site.call), shape)
        return found

    def _of_call(self, site: Site, given: Numbers | None, shape: Shape) -> Numbers | None:
        """A module keeps rows where they are, or returns samples where its rule says."""
        call, axis = site.call, self._survey.axes.get((site.call, site.index), 0)
        if call.is_released or call.rule.is_loss or not call.stored.inputs:
            return None
        received, declared = call.stored.inputs[0], declared_axis(call)
        if given is None and not any(call.edges[:1]):
            given = self._of_input(call)
        if given is None and not any(call.edges[:1]):
            given = self._of_data(tuple(received.shape), declared, call.receives_input > 1)
        if given is None or given.numel() != max(given.shape, default=0):
            return None
        if given.numel() == 1:
            return along(given.flatten(), 0, shape)  # all of it is of one sample
        before = next((k for k, length in enumerate(given.shape) if length > 1), declared)
        is_same = before == declared or shape[: before + 1] == received.shape[: before + 1]
        axis = axis or (before if is_same else 0)
        is_there = axis >= before and shape[axis : axis + 1] == received.shape[before : before + 1]
        return along(given.flatten(), axis, shape) if is_there else None

    def _of_data(self, shape: Shape, axis: int, is_sure: bool = False) -> Numbers | None:
        """Of what is known by its lengths only; and the axis that is declared for samples."""
        samples = self._survey.batch_size
        is_known = is_sure or axis or not is_doubtful(shape, samples)
        if not is_known or shape[axis : axis + 1] != (samples,):
            return None
        return along(self._samples, axis, shape)


def of_data(call: Call, samples: Tensor) -> Numbers | None:
    """The samples of data that a module received, as far as what the model received tells.

    Of a view, strides tell. Where axes were merged, as in ``x.flatten(0, 1)``, or a copy has
    another order, as ``x.transpose(0, 1).reshape(-1, D)``, the values do.
    """
    received, run, size = call.stored.inputs[0], call.run, len(samples)
    shape = tuple(received.shape)
    if has_memory(received) and memory_of(received) in run.memories:
        ways = enumerate(zip(shape, received.stride(), strict=True))
        axes = [k for k, way in ways if way == (size, run.memories[memory_of(received)])]
        if axes:
            return along(samples, axes[0], shape)
    whole = run.first() if call.is_readable else None
    if whole is None or whole.shape[:1] != (size,) or is_symbolic(whole):
        return None
    if (found := _of_view(received, whole)) is not None:
        return found
    is_same = whole.dtype == received.dtype and whole.device == received.device
    if not is_same or whole.numel() != received.numel():
        return None
    for axis in range(whole.dim()):
        turned = whole.movedim(0, axis)
        if turned.reshape(shape).equal(received):
            return viewed(
                along(samples, axis, tuple(turned.shape)), tuple(turned.shape), shape, size
            )
    return None


def _of_view(view: Tensor, whole: Tensor) -> Numbers | None:
    """The samples of a view of some rows, as of ``x[n : n + 1]`` or ``x[n]``: its offset tells."""
    if not has_memory(view) or memory_of(view) != memory_of(whole):
        return None
    row, shape = max(1, whole.stride(0)), tuple(view.shape)
    first, rest = divmod(int(view.storage_offset()) - int(whole.storage_offset()), row)
    numbers = torch.full([1] * len(shape), first, device="cpu")
    for axis, (length, stride) in enumerate(zip(shape, view.stride(), strict=True)):
        if length > 1 and stride and not stride % row:
            steps = torch.arange(length, device="cpu") * (stride // row)
            numbers = numbers + along(steps, axis, shape)
        else:
            rest += (length - 1) * stride
    is_within = rest < row >= max(whole.stride()) and view.numel()
    return numbers if is_within and first >= 0 and numbers.max() < len(whole) else None


def turns_of(survey: Survey, loss: Call) -> Tensor:
    """Which rows that a loss received share a column, ``[K, R]``; no two are of one sample."""
    edge, rows = loss.edges[0], torch.arange(loss.stored.inputs[0].shape[0], device="cpu")
    owners = None if edge is None else Owners(survey).rows(*edge[:2])
    if owners is None:  # all may be of one sample
        return rows == rows[:, None]
    order, counts = owners.argsort(stable=True), owners.bincount()
    count, turns = int(counts.max()), torch.empty_like(owners)
    turns[order] = rows - (counts.cumsum(0) - counts)[owners[order]]
    return turns == torch.arange(count, device="cpu")[:, None]
