"""Tells which samples rows of tensors belong to, from the sample ids that were carried to them.

``carried_ids.py`` finds the ids; here is what walks, refusals and checks ask about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from math import prod

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.propagator import Propagator
from backpack_core.record.call import Call, Edge, Site
from backpack_operations import nodes
from backpack_operations.batch import declared_axis
from backpack_operations.carried_ids import CarriedIds, is_along
from backpack_operations.data import is_unclear
from backpack_operations.entering_ids import is_of_buffers
from backpack_operations.nodes import NodeOutput
from backpack_operations.sample_ids import SampleIds, Shape, are_elsewhere
from backpack_operations.survey import GraphSurvey
from backpack_operations.tensor_lists import is_packed
from backpack_products.values import is_symbolic


class Owners:
    """Knows the samples that rows of tensors belong to.

    Attributes:
        ids: The sample of each entry of any tensor.
    """

    def __init__(self, survey: GraphSurvey) -> None:
        self._survey, self.ids = survey, CarriedIds(survey)

    # Rows of a tensor -----------------------------------------------------------------------------

    def rows(
        self, node: Node | None, output_nr: int, axis: int = 0, is_free: bool | None = None
    ) -> Tensor | None:
        """The sample of each entry of an axis, ``[R]``.

        ``None`` if that is unknown, or if an entry of the axis belongs to several samples. Also
        ``None`` where rows of nobody are among them, which may yet become those of any sample, and
        where the rows may be in order all the same: where all samples are permuted, and may be
        paired with other targets.

        Args:
            node: The node that made the tensor.
            output_nr: Which of its outputs that is.
            axis: Which axis.
            is_free: Whether nothing says that rows are in order. Default: as the walk has found.
        """
        ids = None if node is None else self.ids.at((node, output_nr))
        if node is None or ids is None or not ids.dim():
            return None
        if is_free is None:
            is_free = (node, output_nr) in self._survey.alignment.owned
        lengths = nodes.lengths_of(node, output_nr)[axis : axis + 1]
        return self._rows(ids.movedim(axis, 0), lengths, is_free)

    def _rows(self, ids: SampleIds | None, shape: Shape, is_free: bool) -> Tensor | None:
        if ids is None or not ids.dim() or are_elsewhere(ids):
            return None
        rows = ids.flatten().expand(shape[:1])
        if bool((rows < 0).any()):
            return self.ids.told_rows(shape)
        return (
            rows if is_free or self._survey.told is not None or not self._permutes(rows) else None
        )

    def _permutes(self, rows: Tensor) -> bool:
        """Whether there is one row of each sample, in another order than the samples."""
        samples = self.ids.samples
        return not rows.equal(samples) and rows.sort()[0].equal(samples)

    def are_elsewhere(self, output: NodeOutput) -> bool:
        """Whether a tensor is known to have samples, and rows that belong to several of them."""
        ids = self.ids.at(output)
        return ids is not None and are_elsewhere(ids)

    def are_added_up(self, node: Node) -> bool:
        """Whether an operation reduces an axis of samples other than the first."""
        if nodes.operation_of(node) not in nodes.REDUCTIONS or self.ids.at((node, 0)) is not None:
            return False
        return any(map(self.are_elsewhere, self.ids.operands((node, 0)).values()))

    def meet_in(self, node: Node) -> bool:
        """Whether samples meet in a number other than by a sum, such as in a product or a ratio.

        A function of one number that is such a sum rescales it: each sample has its part of it.
        """
        operands = [
            child
            for child, output_nr in node.next_functions
            if child is not None
            and not nodes.lengths_of(child, output_nr)
            and not self.ids.is_without_samples(child)
        ]
        is_one = len(operands) < 2 and nodes.operation_of(node) not in nodes.SPREADS
        if is_one or nodes.is_linear(node, {*operands}):
            return False
        ids = self.ids.at((node, 0))
        if ids is None:
            return not self._is_of_function((node, 0))
        return ids.numel() > 1  # else all of it is of one sample

    def _is_of_function(self, output: NodeOutput) -> bool:
        """Whether ids are unknown because a Python function lies behind."""
        known, todo, seen = self._survey.sample_ids, [output], set[NodeOutput]()
        while todo:
            this = todo.pop()
            if this in seen or known.get(this) is not None:
                continue
            if nodes.is_function(this[0]) and not nodes.hands_on(this[0]):
                return True
            seen.add(this)
            todo += self.ids.operands(this).values()
        return False

    # What a call received -------------------------------------------------------------------------

    def received_moved(self, call: Call) -> bool:
        """Whether the rows that a call received are known not to be the samples in order."""
        edge = call.edges[0] if call.edges else None
        if edge is None:
            return self._is_data_moved(call)
        ids = self.ids.at(edge[:2])
        if ids is None or is_along(ids, self.ids.axis_of(call, 0)):
            return False
        rows = self.rows(*edge[:2], is_free=True)
        return are_elsewhere(ids) or not (rows is None or rows.equal(self.ids.samples))

    def received_permuted(self, call: Call) -> bool:
        """Whether a call is known to have received one row of each sample, in another order."""
        # Packed sequences are sorted on purpose.
        if not call.edges or any(is_packed(other) for other, _ in self._survey.received):
            return False
        if (edge := call.edges[0]) is not None:
            rows = self.rows(*edge[:2], is_free=True)
        else:
            shape = tuple(call.stored.inputs[0].shape)
            rows = self._rows(self.ids.of_input(call), shape, is_free=True)
        return rows is not None and self._permutes(rows)

    def are_reordered(self, output: NodeOutput) -> bool:
        """Whether samples are in another order than the model's, as far as only lengths tell whose.

        If a model sorts samples before its first layer, and puts them back behind it, rows seem to
        be in order there, and in another one here.
        """
        if output not in self._survey.guessed:
            return False
        rows, given = self.rows(*output, is_free=True), self.ids.input_rows
        if rows is None or (self._survey.is_told and len(rows) == len(given)):
            return rows is not None and not rows.equal(given)
        side_by_side = given.repeat_interleave(len(rows) // max(1, len(given)))
        if rows.sort()[0].equal(side_by_side.sort()[0]):  # several rows of each, or one by one
            in_turn = given.repeat(len(rows) // max(1, len(given)))
            return not (rows.equal(side_by_side) or rows.equal(in_turn))
        seen, expected = dict.fromkeys(rows.tolist()), dict.fromkeys(given.tolist())
        return seen == expected and [*seen] != [*expected]

    def received_elsewhere(self, call: Call) -> bool:
        """Whether a call is known to have received rows that belong to several samples."""
        edge = call.edges[0] if call.edges else None
        return edge is not None and self.are_elsewhere(edge[:2])

    def is_unclear(self, call: Call) -> bool:
        """Whether a module received rows that were picked from data, of unknown samples."""
        is_other = call.is_released or call.rule.is_loss or any(call.edges[:1])
        is_other = is_other or not call.is_readable or self._survey.is_told
        if is_other or self._survey.depth is not None or not call.stored.inputs:
            return False
        data, samples = call.stored.inputs[0], self.ids.samples
        is_usual = call.receives_input > 1 and data.shape[:1] == samples.shape
        is_usual |= self.ids.of_input(call) is not None or not data.dim()
        # If the length is not a multiple of N, it is nowhere taken for several rows of each sample.
        is_usual |= bool(data.shape[:1].numel() % max(1, len(samples)))
        if is_usual or is_of_buffers(call):
            return False
        note = partial(self._survey.compared.__setitem__, call)
        return is_unclear(data, call.run, samples, note)

    # Whether anything moves rows ------------------------------------------------------------------

    @property
    def are_moved(self) -> bool:
        """Whether any tensor may have its rows in another order than the model's input."""
        survey = self._survey
        if survey.are_moved is None:  # looked at while calls still have their tensors
            is_other = survey.is_declared or bool(survey.call_rows) or any(survey.axes.values())
            is_other = is_other or survey.is_told or survey.depth is not None
            is_other = is_other or any(self._moves(node) for node, _ in survey.between)
            is_other = is_other or any(self._is_data_moved(site.call) for site in survey.unusual)
            is_other = is_other or self._are_entries_moved
            survey.are_moved = is_other and self.ids.are_known
        return survey.are_moved

    def _is_data_moved(self, call: Call) -> bool:
        """Whether a module received data in another order than the model did."""
        is_other = call.is_released or call.rule.is_loss or any(call.edges[:1])
        ids, size = None if is_other else self.ids.of_input(call), self._survey.batch_size
        if ids is None and self._survey.is_told and not (is_other or self._is_of_table(call)):
            ids = self.ids.by_length(tuple(call.stored.inputs[0].shape), declared_axis(call))
        if ids is None or not size or is_along(ids, self.ids.axis_of(call, 0)):
            return False
        rows = self._rows(ids, tuple(call.stored.inputs[0].shape), is_free=False)
        return rows is None or not self._are_in_order(rows)

    def _are_in_order(self, rows: Tensor) -> bool:
        """Whether there are as many rows of each sample, one sample after the other."""
        samples = self.ids.samples
        return rows.equal(samples.repeat_interleave(len(rows) // len(samples)))

    @property
    def _are_entries_moved(self) -> bool:
        """Whether operations of parameters met rows in another order, before any module did."""
        survey = self._survey
        for node, region in survey.between if survey.bare and survey.batch_size else ():
            is_inside = not all(call.rule.transparent for call in region)
            if is_inside or self.ids.operands((node, 0)):
                continue
            ids, shape = self.ids.of_entry(node), nodes.lengths_of(node, 0)
            rows = None if ids is None else self._rows(ids, shape, is_free=True)
            is_moved = rows is not None and not self._are_in_order(rows)
            if is_moved or (ids is not None and are_elsewhere(ids)):
                return True
        return False

    def _is_of_table(self, call: Call) -> bool:
        """Whether a module made a table, or received no tensor."""
        sites = (site.edge.node for (own, _), site in self._survey.sites.items() if own is call)
        return not call.stored.inputs or not self._survey.tables.isdisjoint(sites)

    def _moves(self, node: Node) -> bool:
        """Whether an operation may put other rows on axis 0."""
        operation, size = nodes.operation_of(node), self._survey.batch_size
        if operation in nodes.SCATTERS:  # rows are written to where an index says
            is_inside = hasattr(node, "_saved_dim") and nodes.axes_of(node)[0] % len(
                nodes.lengths_of(node, 0) or (1,)
            )
            written = [child for child, _ in node.next_functions[1:] if child is not None]
            return not (is_inside or all(map(self.ids.is_without_samples, written)))
        if operation in nodes.ELEMENTWISE:
            return bool(size) and self._is_put_behind(node)
        edges = enumerate(node.next_functions if operation in nodes.MOVES else ())
        moved = next((each for each in edges if each[1][0] is not None), (0, (None, 0)))
        position, (child, output_nr) = moved  # data may be joined in front of it
        if child is None or not size or nodes.keeps_rows(node, 0, position):
            return False
        if not nodes.lengths_of(child, output_nr):
            return False  # a number has no rows; the operation that picked it is asked, too
        if self._are_as_many and operation in nodes.TURNS | nodes.SELECTIONS:
            # Then an axis of another length is nowhere taken for that of the samples.
            output = (node, 0) if operation in nodes.TURNS else (child, output_nr)
            if (nodes.lengths_of(*output) or (1,))[0] % size:
                return False
        return not self.ids.is_without_samples(child)

    def _is_put_behind(self, node: Node) -> bool:
        """Whether an operand is broadcast along a new first axis that may be taken for its own.

        As in ``mean + noise`` of shapes ``[N, D]`` or ``[1, N, D]``, and ``[K, N, D]``, if ``K`` is
        a multiple of ``N``.
        """
        shape = nodes.lengths_of(node, 0)
        if len(shape) < 2 or shape[0] < 2 or shape[0] % self._survey.batch_size:
            return False
        return any(
            prod(lengths := nodes.lengths_of(child, output_nr)) > 1
            and (len(lengths) < len(shape) or lengths[0] < shape[0])
            and not self.ids.is_without_samples(child)
            for child, output_nr in node.next_functions
            if child is not None
        )

    @cached_property
    def _are_as_many(self) -> bool:
        """Whether all modules received as many rows as there are samples."""
        survey, received = self._survey, self._survey.received.items()
        return all(size == survey.batch_size for (call, _), size in received if any(call.edges))


# Losses -------------------------------------------------------------------------------------------


def note_owners(survey: GraphSurvey, propagators: Iterable[Propagator]) -> None:
    """Note the sample of each row of the losses, if ``subsampling`` chooses samples there.

    They are noted where samples have several rows, and their samples are known.
    """
    if any(propagator.subsampling is not None for propagator in propagators):
        owners = {site: rows_at_loss(survey, site) for site in losses_with_rows(survey)}
        survey.loss_owners = {site: rows for site, rows in owners.items() if rows is not None}


def losses_with_rows(survey: GraphSurvey) -> list[tuple[Call, int]]:
    """The losses that received several rows of each sample."""
    return [site for site in survey.alignment.faults if site[0].rule.is_loss]


def rows_at_loss(survey: GraphSurvey, site: tuple[Call, int]) -> Tensor | None:
    """:func:`owners_at`, found once in a pass, or known from a plan."""
    if site not in survey.loss_rows:
        survey.loss_rows[site] = owners_at(survey, site[0])
    return survey.loss_rows[site]


def owners_at(survey: GraphSurvey, loss: Call) -> Tensor | None:
    """The sample of each row that a loss received, ``[R]``; ``None`` if it is not known."""
    edge = loss.edges[0]
    if is_symbolic(loss.stored.inputs[0]):
        return None
    if survey.batch_size == 1:
        return torch.zeros(loss.stored.inputs[0].shape[:1], dtype=torch.long, device="cpu")
    if edge is None:
        return None
    rows, samples = Owners(survey).rows(*edge[:2]), survey.batch_size
    if rows is None and any(_is_of_layer(site, edge) for site in survey.sites.values()):
        positions = survey.alignment.entries_at(edge)
        if isinstance(positions, int) and positions:  # in a row, as the layer's rule reads them
            return torch.arange(samples, device="cpu").repeat_interleave(positions)
    return rows


def _is_of_layer(site: Site, edge: Edge) -> bool:
    """Whether an edge is the output of a layer with a rule."""
    is_layer = not (site.call.goes_inside or site.call.rule.is_loss)
    return is_layer and site.edge[:2] == edge[:2]
