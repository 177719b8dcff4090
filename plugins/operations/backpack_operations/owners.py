"""Tells which sample each entry of a tensor belongs to, wherever operations have moved entries.

As ``logits[mask]`` picks tokens, or ``hidden.transpose(0, 1).flatten(0, 1)`` puts time first. The
numbers of the samples are carried from what models received to the tensor in question, by the
operations themselves.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from backpack_core._torch import Node, has_memory, memory_of
from backpack_core.graph.nodes import is_leaf
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.owner import is_parameter, owner_of
from backpack_core.record.run import Run
from backpack_operations import nodes
from backpack_operations.alignment import Place
from backpack_operations.batch import declared_axis, is_doubtful
from backpack_operations.data import is_packed, is_unclear, of_data
from backpack_operations.moves import Given, Numbers, Shape, along, are_elsewhere, made
from backpack_operations.of_weights import Origins
from backpack_operations.survey import GraphSurvey, edges_behind
from backpack_products.values import is_symbolic


class Owners:
    """Knows the samples that entries of tensors belong to; each tensor is looked at once."""

    def __init__(self, survey: GraphSurvey) -> None:
        self._survey = survey
        self._origins = Origins(survey)
        self._data: dict[Call, Numbers | None] = {}
        self._entries: dict[Node, Numbers | None] = {}

    @cached_property
    def _samples(self) -> Tensor:
        return torch.arange(self._survey.batch_size, device="cpu")

    @property
    def _received_rows(self) -> Tensor:
        """The sample of each row that a model received: one row each, or as the user says."""
        told = self._survey.told
        return self._samples if told is None else told.rows

    def rows(
        self, node: Node | None, number: int, axis: int = 0, is_free: bool | None = None
    ) -> Tensor | None:
        """The sample of each entry of an axis; ``None`` if that is unknown, or several share one.

        Or if it may be by order all the same: where entries of one sample stand among some of
        nobody, or all samples in another order, which may be paired with targets of others.

        Args:
            node: What made the tensor.
            number: Which of its outputs that is.
            axis: Which axis.
            is_free: Whether nothing says that entries are by order. Default: as the walk has found.
        """
        numbers = None if node is None else self._of((node, number))
        if node is None or numbers is None or not numbers.dim():
            return None
        if is_free is None:
            is_free = (node, number) in self._survey.alignment.owned
        lengths = nodes.lengths_of(node, number)[axis : axis + 1]
        return self._rows(numbers.movedim(axis, 0), lengths, is_free)

    def _rows(self, numbers: Numbers | None, shape: Shape, is_free: bool) -> Tensor | None:
        if numbers is None or not numbers.dim() or are_elsewhere(numbers):
            return None
        rows, known = numbers.flatten().expand(shape[:1]), numbers[numbers >= 0]
        if len(known) < numbers.numel():
            is_one = is_free and len(known.unique()) == 1
            return known[:1].expand(shape[:1]) if is_one else self._told(shape)
        is_turned = not rows.equal(self._samples) and rows.sort()[0].equal(self._samples)
        is_known = is_free or self._survey.told is not None
        return rows if is_known or not is_turned else None

    @property
    def are_moved(self) -> bool:
        """Whether rows of anything may be other samples than rows of what the model received."""
        survey = self._survey
        if survey.are_moved is None:  # it is found out while calls have their tensors
            is_other = survey.is_declared or bool(survey.rows) or any(survey.axes.values())
            is_other = is_other or survey.is_told or survey.depth is not None
            is_other = is_other or any(self._moves(node) for node, _ in survey.seen)
            is_other = is_other or any(self._is_moved(site.call) for site in survey.unusual)
            # What the user says needs no reading of what operations saved.
            is_readable = survey.is_told or survey.is_readable
            survey.are_moved = is_other and is_readable and self._are_known
        return survey.are_moved

    def _is_moved(self, call: Call) -> bool:
        """Whether a module received data in another order than the model did."""
        is_other = call.is_released or call.rule.is_loss or any(call.edges[:1])
        numbers, size = None if is_other else self.of_input(call), self._survey.batch_size
        if numbers is None and self._survey.is_told and not (is_other or self._is_of_table(call)):
            numbers = self._of_data(tuple(call.stored.inputs[0].shape), declared_axis(call))
        if numbers is None or not size or self._is_along(numbers, self._axis(call, 0)):
            return False
        rows = self._rows(numbers, tuple(call.stored.inputs[0].shape), is_free=False)
        return rows is None or not rows.equal(self._samples.repeat_interleave(len(rows) // size))

    def _is_of_table(self, call: Call) -> bool:
        """Whether a module made a table, or received no tensor."""
        sites = (site.edge.node for (own, _), site in self._survey.sites.items() if own is call)
        return not call.stored.inputs or not self._survey.tables.isdisjoint(sites)

    def of_input(self, call: Call) -> Numbers | None:
        """Of data that a module received; each call is asked once."""
        if call not in self._data:
            stored, is_other = call.stored.inputs, bool(declared_axis(call))
            is_other |= self._survey.told is not None or self._survey.depth is not None
            is_first = call.receives_input > 1 and stored[0].shape[:1] == self._samples.shape
            is_known = not stored or (is_first and not is_other) or is_of_buffers(call)
            self._data[call] = None if is_known else self._of_tensor(stored[0], call)
        return self._data[call]

    def is_unclear(self, call: Call) -> bool:
        """Whether a module received rows that were picked from data, and it is not known whose."""
        is_other = call.is_released or call.rule.is_loss or any(call.edges[:1])
        is_other = is_other or not call.is_readable or self._survey.is_told
        if is_other or self._survey.depth is not None or not call.stored.inputs:
            return False
        if is_of_buffers(call):
            return False
        data = call.stored.inputs[0]
        is_usual = call.receives_input > 1 and data.shape[:1] == self._samples.shape
        # Another number of rows is nowhere taken for as many of each sample.
        is_usual |= self.of_input(call) is not None or not data.dim()
        is_usual |= bool(data.shape[:1].numel() % max(1, len(self._samples)))
        return not is_usual and is_unclear(data, call.run, self._samples)

    def _moves(self, node: Node) -> bool:
        operation, size = nodes.operation_of(node), self._survey.batch_size
        child, number = node.next_functions[0] if operation in nodes.MOVES else (None, 0)
        if child is None or not size or nodes.keeps_rows(node, 0, 0):
            return False
        if not nodes.lengths_of(child, number):
            return False  # a number has no rows; what picked it from rows is seen by itself
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

    def received_permuted(self, call: Call) -> bool:
        """Whether a call is known to have received one row of each sample, in another order."""
        # Packed sequences are in an order of their own on the way.
        if not call.edges or any(is_packed(other) for other, _ in self._survey.received):
            return False
        if (edge := call.edges[0]) is not None:
            rows = self.rows(*edge[:2], is_free=True)
        else:
            shape = tuple(call.stored.inputs[0].shape)
            rows = self._rows(self.of_input(call), shape, is_free=True)
        if rows is None or rows.equal(self._samples):
            return False
        return rows.sort()[0].equal(self._samples)

    def received_elsewhere(self, call: Call) -> bool:
        """Whether what a call received is known to have samples, with rows of several."""
        edge = call.edges[0] if call.edges else None
        if edge is None or not self._survey.is_readable:
            return False
        return self.are_elsewhere(edge[:2])

    def are_elsewhere(self, place: Place) -> bool:
        """Whether a tensor is known to have samples, and rows that belong to several."""
        numbers = self._of(place)
        return numbers is not None and are_elsewhere(numbers)

    def meet_in(self, node: Node) -> bool:
        """Whether a number is not a sum of several that samples share, as their product or ratio.

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

    def numbers_at(self, place: Place) -> Numbers | None:
        """The samples that entries of a tensor belong to, as far as it is known."""
        return self._of(place)

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
                found = self._found(this, given)
                known[this] = self._as_said(this, found)
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

        It does not where they are on another axis, or axis 0 got another length: then the nodes
        inside do.
        """
        site = self._site(place)
        if site is not None and self._survey.received.get(site[:2]) == -1:
            return None
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
            if self._entry(node) is not None:
                return False
            node = node.next_functions[0][0]
        if is_leaf(node):
            leaf = node.variable  # type: ignore[attr-defined]
            return is_parameter(leaf) or not leaf.dim() or id(leaf) in self._survey.uses
        return self._origins.of_tables(node)

    def _found(self, place: Place, given: Given) -> Numbers | None:
        node, number = place
        shape, rows = nodes.lengths_of(node, number), self._survey.rows.get(node)
        if rows is not None:
            return along(rows.cpu(), 0, shape)
        if (site := self._call(place)) is not None:
            return self._of_call(site, given.get(0), shape)
        if is_leaf(node):
            return self._of_leaf(node.variable, shape)  # type: ignore[attr-defined]
        try:
            found = self._made(node, number, given)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            found = None  # a pass that looks around later has executed it
        if found is None and (site := self._site(place)) is not None:
            # No module is known to move samples to another axis.
            found = self._of_call(site, self._received(site.call), shape)
        return found

    def _made(self, node: Node, number: int, given: Given) -> Numbers | None:
        """What an operation makes of the numbers at its operands, or of data."""
        if not given and (entry := self._entry(node)) is not None:
            return entry
        rows, is_readable = self._received_rows, self._survey.is_readable
        if nodes.operation_of(node) in nodes.INDEXED and given.get(0, rows) is None:
            given[0] = self._in_order(node.next_functions[0])
        return made(node, number, self._telling(node, given), rows, is_readable, self._note_read)

    def _note_read(self) -> None:
        self._survey.are_by_values = True

    def _as_said(self, place: Place, found: Numbers | None) -> Numbers | None:
        """Where nothing is known: the rows of the user's index, if as many; the dye will tell.

        So it is where rows of one sample have met. Where all of it is of one sample, or some of
        none, there may be nothing of the others.
        """
        node, number = place
        if not self._survey.is_told or nodes.is_stack_of_numbers(node):
            return found
        if found is not None and found.numel() > 1 and bool((found >= 0).all()):
            return found
        shape = nodes.lengths_of(node, number)
        rows = None if self._origins.of_weights(node) else self._told(shape)
        return found if rows is None else along(rows, 0, shape)

    def _in_order(self, operand: tuple[Node | None, int]) -> Numbers | None:
        """Of what an index picks from, if nothing else is known: samples one after the other.

        The walk takes it so as well. Without it, as many entries as samples would be taken for one
        of each.
        """
        child, number = operand
        shape, survey = () if child is None else nodes.lengths_of(child, number), self._survey
        is_other = survey.is_declared or survey.is_told or survey.depth is not None
        # Before samples are sought in the graph, how many there are is a question itself.
        if is_other or not shape or not survey.alignment.batch_size:
            return None
        count, rest = divmod(shape[0], survey.batch_size)
        return None if rest else along(self._samples.repeat_interleave(count), 0, shape)

    def _told(self, shape: Shape) -> Tensor | None:
        """What the user said of so many rows, if they are as many as the model received."""
        told = self._survey.told
        if told is None or told.is_usual or not shape or not len(told.rows):
            return None
        count, rest = divmod(shape[0], len(told.rows))
        rest |= self._survey.is_declared and count > 1  # several for each may come first, too
        return None if rest else told.rows.repeat_interleave(count)

    def _telling(self, node: Node, given: Given) -> Given:
        """Without operands of constants and parameters, which go with what they meet."""
        is_of_constants = self._origins.of_constants
        ways = {i: node.next_functions[i][0] for i, numbers in given.items() if numbers is None}
        beside = {i for i, child in ways.items() if child is not None and is_of_constants(child)}
        return {i: numbers for i, numbers in given.items() if i not in beside}

    def _of_call(self, site: Site, given: Numbers | None, shape: Shape) -> Numbers | None:
        """A module keeps rows where they are, or returns samples where its rule says."""
        call, axis = site.call, self._survey.axes.get((site.call, site.index), 0)
        if call.is_released or call.rule.is_loss or not call.stored.inputs:
            return None
        received, declared = call.stored.inputs[0], declared_axis(call)
        if given is None and not any(call.edges[:1]):
            given = self.of_input(call)
        if given is None and not any(call.edges[:1]):
            # One of several inputs may be as long as the batch by chance.
            is_sure = call.receives_input > 1 or len(call.run.inputs) < 2
            given = self._of_data(tuple(received.shape), declared, is_sure)
        if given is None or given.numel() != max(given.shape, default=0):
            return None
        if given.numel() == 1:
            return along(given.flatten(), 0, shape)  # all of it is of one sample
        before = next((k for k, length in enumerate(given.shape) if length > 1), declared)
        is_same = before == declared or shape[: before + 1] == received.shape[: before + 1]
        axis = axis or (before if is_same else 0)
        is_there = axis >= before and shape[axis : axis + 1] == received.shape[before : before + 1]
        return along(given.flatten(), axis, shape) if is_there else None

    def _of_tensor(self, data: Tensor, call: Call | None = None) -> Numbers | None:
        """Of data that a call received, or that any run uses, as what models received tells."""
        survey, rows = self._survey, self._received_rows
        items = None if survey.told is None else survey.told.items
        if call is not None:
            found = of_data(data, call.run, rows, survey.depth, items, call.is_readable)
        else:
            every = (of_data(data, run, rows, survey.depth, items) for run in self._runs)
            found = next((numbers for numbers in every if numbers is not None), None)
        # That data are not in another order than what the model received counts as known.
        is_usual = found is None or found.equal(along(rows, 0, tuple(found.shape)))
        survey.are_by_values |= not is_usual
        return found

    @property
    def _runs(self) -> list[Run]:
        return [*{id(call.run): call.run for call, _ in self._survey.received}.values()]

    def _of_leaf(self, leaf: Tensor, shape: Shape) -> Numbers | None:
        """Of data that ask for a gradient."""
        known = self._of_tensor(leaf) if self._survey.is_readable else None
        return self._of_data(shape, 0) if known is None else known

    def _entry(self, node: Node) -> Numbers | None:
        """Of what an operation makes of parameters and data, if its rows are those of the data."""
        if node not in self._entries:
            origins = self._origins
            is_entry = origins.of_constants(node) and not origins.has_own_rows(node)
            self._entries[node] = self.of_entry(node) if is_entry else None
            if is_entry:
                self._survey.looked_at[node] = self._entries[node]
        return self._entries[node]

    def of_entry(self, node: Node) -> Numbers | None:
        """Of what an operation makes of parameters and data, as the numbers in the data tell."""
        survey, shape = self._survey, nodes.lengths_of(node, 0)
        data, count = nodes.rows_of(node) if survey.is_readable else (None, 0)
        data = data if data is not None and data.dim() and has_memory(data) else None
        numbers = None if data is None else self._of_tensor(data)
        if numbers is not None and numbers.shape[count:].numel() == 1:
            return numbers.reshape(*numbers.shape[:count], *[1] * (len(shape) - count))
        is_table = nodes.operation_of(node) in nodes.GATHERS and count < 2
        is_even = data is not None and (not data.dim() or bool((data == data[:1]).all()))
        if is_table or is_even:
            return None  # it may be as long by chance; a first state of zeros says nothing
        (axis, *others) = {run.axis for run in self._runs} or {0}
        return None if others else self._of_data(shape, axis)

    def _of_data(self, shape: Shape, axis: int, is_sure: bool = False) -> Numbers | None:
        """Of what is known by its lengths only; and the axis that is declared for samples."""
        rows = self._received_rows
        is_known = is_sure or axis or not is_doubtful(shape, len(rows))
        is_known = is_known and self._survey.depth is None
        if not is_known or shape[axis : axis + 1] != (len(rows),):
            return None
        return along(rows, axis, shape)


def is_of_buffers(call: Call) -> bool:
    """Whether a call received only buffers of the model, as a net of coordinates does."""
    memories = set(map(memory_of, filter(has_memory, owner_of(call.module).buffers())))
    return bool(memories) and all(memory_of(t) in memories for t in call.stored.inputs)


def entries_of_losses(survey: GraphSurvey) -> dict[tuple[Call, int], Tensor]:
    """The sample of each row that a loss received, where samples have several and it is known."""
    losses = [site for site in survey.alignment.faults if site[0].rule.is_loss]
    found = {site: owners_at(survey, site[0]) for site in losses}
    return {site: owners for site, owners in found.items() if owners is not None}


def owners_at(survey: GraphSurvey, loss: Call) -> Tensor | None:
    """The sample of each row that a loss received, ``[R]``; ``None`` if it is not known."""
    edge = loss.edges[0]
    if is_symbolic(loss.stored.inputs[0]):
        return None
    if survey.batch_size == 1:
        return torch.zeros(loss.stored.inputs[0].shape[:1], dtype=torch.long, device="cpu")
    if edge is None:
        return None
    found, samples = Owners(survey).rows(*edge[:2]), survey.batch_size
    if found is None and any(_is_of_layer(site, edge) for site in survey.sites.values()):
        positions = survey.alignment.entries_at(edge)
        if isinstance(positions, int) and positions:  # side by side, as the layer is read
            return torch.arange(samples, device="cpu").repeat_interleave(positions)
    return found


def _is_of_layer(site: Site, edge: Edge) -> bool:
    is_read = not (site.call.goes_inside or site.call.rule.is_loss)
    return is_read and site.edge[:2] == edge[:2]
