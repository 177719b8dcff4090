"""The sample ids of what enters a graph: data that layers and operations of parameters received.

What models received tells them (``data.py``), or else only the length. ``carried_ids.py`` carries
them on.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node, has_memory, memory_of
from backpack_core.graph import is_leaf
from backpack_core.record.call import Call
from backpack_core.record.models import Run
from backpack_operations import nodes, sample_ids
from backpack_operations.batch import declared_axis, is_doubtful
from backpack_operations.data import Note, of_data
from backpack_operations.of_weights import Origins
from backpack_operations.received import memories_of_buffers
from backpack_operations.sample_ids import SampleIds, Shape, along
from backpack_operations.survey import GraphSurvey


class EnteringIds:
    """The sample of each entry of data, where they enter a graph.

    Attributes:
        samples: ``[0, ..., N - 1]``.
    """

    def __init__(self, survey: GraphSurvey) -> None:
        self._survey = survey
        self._origins = Origins(survey)
        self._entries: dict[Node, SampleIds | None] = {}
        self._by_length: set[Node] = set()  # entries whose ids only lengths tell

    @cached_property
    def samples(self) -> Tensor:
        """The numbers of all samples, ``[N]``."""
        return torch.arange(self._survey.batch_size, device="cpu")

    @property
    def input_rows(self) -> Tensor:
        """The sample of each row that a model received: one row each, unless the user said so."""
        told = self._survey.told
        return self.samples if told is None else told.rows

    def of_input(self, call: Call) -> SampleIds | None:
        """The ids of data that a module received; ``None`` if usual, or unknown."""
        known = self._survey.input_ids
        if call not in known:
            of_rows = self._of_made_rows if call in self._of_made_rows else [call]
            found = {each: self._find(each) for each in of_rows}
            is_known = len(of_rows) < 2 or not any(ids is None for ids in found.values())
            known.update(found if is_known else dict.fromkeys(found))
        return known[call]

    def _find(self, call: Call) -> SampleIds | None:
        inputs, survey = call.stored.inputs, self._survey
        is_other = declared_axis(call) or survey.told is not None or survey.depth is not None
        is_first = call.receives_input > 1 and inputs[0].shape[:1] == self.samples.shape
        is_usual = not inputs or (is_first and not is_other) or is_of_buffers(call)
        note = partial(survey.compared.__setitem__, call)
        return None if is_usual else self._of_tensor(inputs[0], note, call)

    @cached_property
    def _of_made_rows(self) -> list[Call]:
        """Calls that received rows of what layers made, joined or picked.

        If the samples of some are not known, as those of equal rows, operations behind may still
        know all of them: they put tokens of experts back by an index.
        """
        return [
            call
            for call, _ in self._survey.received
            if call.run.made
            and not (call.receives_input or any(call.edges[:1]) or call.rule.is_loss)
        ]

    # Data -----------------------------------------------------------------------------------------

    def _of_tensor(self, data: Tensor, note: Note, call: Call | None = None) -> SampleIds | None:
        """The ids of data that a call received, or that any run uses, by what models received."""
        survey, rows = self._survey, self.input_rows
        items = None if survey.told is None else survey.told.items
        if call is not None:
            ids = of_data(data, call.run, rows, survey.depth, items, call.is_readable, note)
        else:
            how = rows, survey.depth, items, True, note
            by_run = (of_data(data, run, *how) for run in self._runs)
            ids = next((each for each in by_run if each is not None), None)
        is_usual = ids is None or ids.equal(along(rows, 0, tuple(ids.shape)))
        survey.are_by_values |= not is_usual
        return ids

    @cached_property
    def _runs(self) -> list[Run]:
        return self._survey.runs_of(call for call, _ in self._survey.received)

    def _of_leaf(self, node: Node) -> SampleIds | None:
        """The ids of data that require a gradient."""
        leaf: Tensor = node.variable  # type: ignore[attr-defined]
        found = list[Any]()
        ids = self._of_tensor(leaf, found.append) if self._survey.is_readable else None
        ids = self.by_length(tuple(leaf.shape), 0) if ids is None else ids
        if found:
            self._survey.looked_at[node] = ids
        return ids

    def of_entry(self, node: Node) -> SampleIds | None:
        """The ids where parameters meet data outside of modules, if the rows are the data's."""
        if node not in self._entries:
            is_entry = self._origins.of_constants(node)
            is_entry &= not self._origins.has_own_rows(node) or nodes.is_widened(node)
            self._entries[node] = self.of_data_at(node) if is_entry else None
            if is_entry:
                self._survey.looked_at[node] = self._entries[node]
        return self._entries[node]

    def of_data_at(self, node: Node) -> SampleIds | None:
        """The ids of the data that an operation saved, as an index or a factor; or of a leaf."""
        if is_leaf(node):
            return self._of_leaf(node)
        survey, shape = self._survey, nodes.lengths_of(node, 0)
        data, position = nodes.data_of(node) if survey.may_read(node) else (None, 0)
        data = data if data is not None and data.dim() and has_memory(data) else None
        has_own_rows, is_by_values = self._origins.has_own_rows(node), survey.are_by_values
        ids = None if data is None else self._of_tensor(data, lambda _: None)
        if has_own_rows or shape[:1] == (1,):  # a plan with these ids looks at the data again
            survey.are_by_values = is_by_values
        if ids is not None and (found := sample_ids.from_data(node, position, ids)) is not None:
            return found
        if has_own_rows:
            return None if data is None else self._by_inner_length(node, position, data)
        operation = nodes.operation_of(node)
        is_table = operation in nodes.GATHERS and (data is None or data.dim() < 2)
        is_whole = data is not None and (operation != "Mul" or data.shape == shape)
        if is_table or (data is not None and is_whole and bool((data == data[:1]).all())):
            return None  # as long as the batch by chance, as an initial state of zeros may be
        (axis, *others) = {run.axis for run in self._runs} or {0}
        self._by_length.add(node)
        return None if others else self.by_length(shape, axis)

    def _by_inner_length(self, node: Node, position: int, data: Tensor) -> SampleIds | None:
        """Ids along the only axis of data that is as long as the batch, behind rows of parameters.

        Several nets in one tensor of weights put their own axis in front of the samples.
        """
        rows, shape, survey = self.input_rows, tuple(data.shape), self._survey
        lengths = [n if stride else 1 for n, stride in zip(shape, data.stride(), strict=True)]
        is_other = survey.is_declared or survey.is_told or survey.depth is not None
        if lengths[:1] == [len(rows)] and bool((data == data[:1]).all()):
            lengths[0] = 1  # copies
        if is_other or len(rows) < 2 or lengths[:1] == [len(rows)]:
            return None
        axes = [axis for axis, n in enumerate(lengths) if n == len(rows)]
        found = [sample_ids.from_data(node, position, along(rows, k, shape)) for k in axes]
        found = [ids for ids in found if ids is not None]  # not along an axis that is summed over
        self._by_length.add(node)
        return found[0] if len(found) == 1 else None

    def by_length(self, shape: Shape, axis: int, is_sure: bool = False) -> SampleIds | None:
        """Ids along the declared axis, if that is as long as what the model received.

        Args:
            shape: The shape of a tensor; nothing else is known of it.
            axis: The declared axis.
            is_sure: Whether no other axis can be that of the samples.
        """
        rows = self.input_rows
        is_clear = is_sure or axis or not is_doubtful(shape, len(rows))
        if not is_clear or self._survey.depth is not None:
            return None
        return along(rows, axis, shape) if shape[axis : axis + 1] == (len(rows),) else None


def is_of_buffers(call: Call) -> bool:
    """Whether a call received only buffers of the model, as a net of coordinates does."""
    memories = memories_of_buffers(call)
    return bool(memories) and all(memory_of(t) in memories for t in call.stored.inputs)
