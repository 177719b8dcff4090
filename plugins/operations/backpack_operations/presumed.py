"""A second opinion on the order of rows: what it is if all rows without a graph came in order.

Nothing shows in which order the first trained layers received rows that a model computed without a
graph. The walk from the loss takes those at the loss to be in order. If operations in between
changed the order, only one of both can be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import described
from backpack_core.record.call import Edge, Site
from backpack_operations import nodes
from backpack_operations.carried_ids import CarriedIds
from backpack_operations.nodes import NodeOutput
from backpack_operations.order import behind
from backpack_operations.owners import Owners
from backpack_operations.received import is_by_sample
from backpack_operations.sample_ids import OperandIds, SampleIds, Shape, along, are_elsewhere
from backpack_operations.survey import GraphSurvey
from backpack_operations.tensor_lists import is_packed


def _is_other(survey: GraphSurvey) -> bool:
    """Whether no order can be presumed: rows are not those of samples, one after the other."""
    is_other = survey.is_declared or survey.depth is not None or bool(survey.call_rows)
    is_other |= any(call.is_released or is_packed(call) for call, _ in survey.received)
    return is_other or survey.batch_size < 2


def _entries(survey: GraphSurvey) -> list[Site]:
    """The outputs of layers that received data, in passes of which orders can be presumed."""
    received = () if _is_other(survey) else survey.received
    return [survey.sites[c, i] for c, i in received if not (c.rule.is_loss or any(c.edges))]


def _axis_behind(shape: Shape, samples: int) -> int:
    """The only axis as long as the batch, if axis 0 has no samples: ``[V, N, D]``; else 0."""
    inner = shape[1:-1]  # the last axis has features
    is_behind = inner.count(samples) == 1 and bool(shape[0] % samples)
    return 1 + inner.index(samples) if is_behind else 0


class Entering(NamedTuple):
    """Data that a layer received, or an operation of parameters.

    Attributes:
        who: The path of the layer, or the operation.
        output: What was made of the data.
        data: The data.
        ids: The samples of the data; ``None`` if nothing tells them.
    """

    who: str
    output: NodeOutput
    data: Tensor
    ids: SampleIds | None


def of_unknown_order(survey: GraphSurvey, ends: Sequence[Edge]) -> Entering | None:
    """Data with several rows of each sample, in an order that nothing shows.

    All ends behind have such rows, too. If an end has one row of each sample, operations made it of
    rows that follow each other.

    Args:
        survey: What is known about the graph.
        ends: What losses received.
    """
    ids, positions = Owners(survey).ids, survey.alignment.positions
    rows = len(ids.input_rows)
    for entering in _entering(survey, ids):
        _, output, data, known = entering
        is_several = data.is_floating_point() and len(data) > rows and not is_by_sample(data, rows)
        if known is None and is_several and positions.get(output, 1) > 1:
            behind_ends = [e for e in ends if output[0] in {e.node, *behind([e.node])}]
            if behind_ends and all(positions.get(end[:2]) != 1 for end in behind_ends):
                return entering
    return None


def _entering(survey: GraphSurvey, ids: CarriedIds) -> Iterator[Entering]:
    """What layers and operations of parameters received as data, and did not share with a model."""
    for site in _entries(survey):
        call = site.call
        first = call.stored.inputs[0]
        if first.dim() and not call.receives_input:
            yield Entering(call.path, site.edge[:2], first, ids.of_input(call))
    is_any = survey.bare and not _is_other(survey)
    for node, region in survey.between if is_any else ():
        is_between = all(call.rule.transparent for call in region)
        is_entry = is_between and survey.may_read(node) and not ids.operands((node, 0))
        data, _ = nodes.data_of(node) if is_entry else (None, 0)
        if data is not None and data.dim():
            yield Entering(described(node), (node, 0), data, ids.of_entry(node))


def contradicts(survey: GraphSurvey, ends: Sequence[Edge]) -> bool:
    """Whether rows at an end of the net are in another order than is assumed there.

    Args:
        survey: What is known about the graph, and assumed.
        ends: What losses received.
    """
    is_other = _is_other(survey)
    if is_other or not (survey.bare or any(s.call.receives_input < 2 for s in _entries(survey))):
        return False  # or all layers received what the model did
    other = copy(survey)
    other.sample_ids, other.guessed, other.tables, other.are_moved = {}, set(), set(), None
    other.read_at, other.looked_at, other.compared = {}, {}, {}
    other.input_ids = {**survey.input_ids}
    owners, samples = Owners(other), survey.batch_size
    are_behind = (_axis_behind(r.data.shape, samples) for r in _entering(survey, owners.ids))
    if not (owners.are_moved or any(are_behind)):
        return False
    ids, found = PresumedIds(other, survey), False
    for edge in ends:
        expected = _expected(survey, edge[:2])
        if expected is None:
            continue
        if ids.are_behind(edge[:2]):
            return True
        if (presumed := ids.rows(edge[:2])) is not None:
            found = True
            if not presumed.equal(expected):
                return True
    # Another index may contradict in a later pass.
    survey.values_read |= found and not other.read_at.keys() <= survey.read_at.keys()
    return False


def _expected(survey: GraphSurvey, output: NodeOutput) -> Tensor | None:
    """The sample of each row at an end, as the walk has found or assumed."""
    alignment = survey.alignment
    if (owned := alignment.owned.get(output)) is not None:
        return owned.int().argmax(0)
    positions = alignment.positions.get(output, 0)
    samples = torch.arange(survey.batch_size, device="cpu")
    return samples.repeat_interleave(positions) if positions else None


class PresumedIds(CarriedIds):
    """Sample ids if all rows without a graph, as many as samples or a multiple, came in order.

    What more than lengths tells is kept.
    """

    def __init__(self, survey: GraphSurvey, found: GraphSurvey) -> None:
        """Begin; ``found`` is the survey with the ids that were found before."""
        super().__init__(survey)
        self._found, self._is_entry = found, False
        # The rows without a graph that a tensor was computed from.
        self._sources: dict[NodeOutput, frozenset[NodeOutput]] = {}
        self._of_several: set[NodeOutput] = set()  # from rows of several sources

    def rows(self, output: NodeOutput) -> Tensor | None:
        """The sample of each row; ``None`` if that is unknown, or not presumed.

        Of rows that were joined from several sources, the order is a guess. If some sample has none
        of those that are left, the guess is dropped.
        """
        ids, (length, *_) = self.at(output), (*nodes.lengths_of(*output), 0)
        if ids is None or not ids.dim() or are_elsewhere(ids) or not self._sources[output]:
            return None
        rows = ids.flatten().expand(length)
        has_all = len(rows.unique()) == len(self.input_rows.unique())
        return rows if has_all or output not in self._of_several else None

    def are_behind(self, output: NodeOutput) -> bool:
        """Whether presumed rows lie along one axis other than the first."""
        ids = self.at(output)
        is_one = (
            ids is not None and ids.numel() > 1 and ids.numel() == max(ids.shape[1:], default=0)
        )
        return is_one and bool(self._sources[output])

    def by_length(self, shape: Shape, axis: int, is_sure: bool = False) -> SampleIds | None:
        """Ids in order, also for several rows of each sample."""
        rows = self.input_rows
        axis = _axis_behind(shape, len(rows)) or axis
        count, rest = divmod(shape[axis] if len(shape) > axis else 0, len(rows))
        if rest or not count:
            return None
        self._is_entry = True
        return along(rows.repeat_interleave(count), axis, shape)

    def _or_told(
        self, output: NodeOutput, operand_ids: OperandIds, ids: SampleIds | None
    ) -> SampleIds | None:
        return ids

    def _picked_from(
        self, operand: tuple[Node | None, int], ids: SampleIds | None
    ) -> SampleIds | None:
        return ids

    def _derive(self, output: NodeOutput, operand_ids: OperandIds) -> SampleIds | None:
        known, node, operands = self._found.sample_ids.get(output), output[0], self.operands(output)
        if known is not None and output not in self._found.guessed:
            self._sources[output] = frozenset()
            return known
        self._is_entry = False
        ids, shape = super()._derive(output, operand_ids), nodes.lengths_of(*output)
        sources = {self._sources[operand] for operand in operands.values()}
        is_own = not operands and (ids is None or self._is_entry)
        self._sources[output] = frozenset([output] if is_own else []).union(*sources)
        operation, is_several = nodes.operation_of(node), len(sources) > 1
        is_put, is_picked = operation in nodes.SCATTERS, operation in nodes.INDEXED
        is_joined = not self._of_several.isdisjoint(operands.values())
        if is_joined or (is_several and nodes.joins(node)):
            self._of_several |= set() if is_put or is_picked else {output}
        is_put &= is_several or is_joined or ids is None
        is_picked &= is_joined
        if sources and (is_put or is_picked or (is_several and nodes.joins(node))):
            return self.by_length(shape, 0)  # the index, or else the model, puts rows into order
        if not sources or ids is None:
            return ids
        if sum(length > 1 for length in ids.shape) > 1:
            return None  # no net has its samples along two axes
        is_turned = operation in nodes.TURNS and are_elsewhere(ids)
        return None if is_turned and not shape[0] % len(self.input_rows) else ids
