"""Recognises a recorded graph by a key: graphs with equal keys have the same decisions.

One walk from the roots notes every fact that a decision may depend on: settings of modules, types
of the operations between them, shapes, which parameters are frozen, and which are shared. Of the
numbers in tensors it notes only whether an index has all rows in order. Some graphs have no key,
such as those with a view that was overwritten in place, or with hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core._torch import LeafNode, Node, has_memory, memory_of
from backpack_core.engine.active import Context
from backpack_core.record.call import SITES, VIEWED, Call, Edge, Site
from backpack_core.record.models import NO_RUN, NO_RUN_OF_RANKS, Run, owner_of
from backpack_operations import nodes
from backpack_operations._torch import CopyNode
from backpack_operations.noted import Noted, Unplanned, noted_of
from backpack_operations.parameter_owners import owned_by_models
from backpack_operations.received import (
    RETURNED,
    ModelRun,
    Rows,
    is_by_sample,
    memories_of_buffers,
    relations,
    rows_of,
    span_of,
)
from backpack_products.substitutes import computed_substitutes, is_parameter

Region = tuple[Call, ...]  # calls that the walk goes through, each inside of the next

OVERWRITTEN = "a view was overwritten in place"


class Structure:
    """A graph, with the key that tells it from others.

    Attributes:
        sites: Every output of a call, in the order of the walk.
        places: Every output of a node that the walk has met, with its number.
        between: The nodes between calls, and inside of calls without a rule, with their numbers.
        parameters: The parameters that calls and operations use, in the order of the walk.
        key: The facts: equal for graphs of equal shapes that have the same decisions.
    """

    def __init__(self, roots: Iterable[Edge], context: Context) -> None:
        """Walk the graph.

        Args:
            roots: What ``backward()`` is called on.
            context: What was asked for.

        Raises:
            Unplanned: The graph has no key.
        """
        self.sites: dict[tuple[Call, int], Site] = {}
        self.between: dict[Node, int] = {}
        self.parameters: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._runs: dict[Run, int] = {}
        self._buffers: dict[Module, set[int]] = {}  # memories of the buffers of models
        self._rows: list[Rows] = []  # of memories that calls received outside of models
        self._regions: dict[Node, Region] = {}
        self._indexing: list[Node] = []
        self.places: dict[nodes.NodeOutput, int] = {}
        todo: list[tuple[Node, int, Region]] = [(*edge[:2], ()) for edge in roots]
        self._facts: list[Any] = [len(todo)]
        sites, places, facts = self.sites, self.places, self._facts
        while todo:
            node, number, region = todo.pop()
            place = node, number
            while region and any(e and e[:2] == place for e in region[0].edges):
                region = region[1:]  # an input of the call: the walk leaves its inside
            if place in places:
                facts.append(places[place])
                if node in self.between and self._regions.get(node, ()) != region:
                    raise Unplanned("an operation is reached from inside of a module and outside")
                continue
            places[place] = len(places)
            facts.append(number)  # which part of a chunk it is
            noted: Any = node.metadata
            found = noted[SITES].get(number) if SITES in noted else None
            if RETURNED in noted and number in noted[RETURNED]:
                run = noted[RETURNED][number]
                facts.append(self._runs.get(run) or self._belongs_to(run))
            if VIEWED in noted:
                for call, _, layout in noted[VIEWED].get(number, ()):
                    if layout.is_whole and call not in region:
                        raise Unplanned(OVERWRITTEN)
            if found is None:
                further = self._pass(node, region)
            else:
                call, index = found
                sites[found] = Site(call, index, Edge(node, number))
                further = self._note(call, index)
                if call.rule.calls_others:
                    facts += inside_of(call, node)
                if call.rule.transparent:
                    further = self._pass(node, region)  # the output's own node is met from outside
                    region = (call, *region)
            for edge in further:
                todo.append((edge[0], edge[1], region))
        indexed = map(nodes.axes_indexed, self._indexing)  # all calls are readable, so nodes are
        self.key = (*facts, *indexed, *self._relations(context))

    @cached_property
    def _flat(self) -> list[Any]:
        """The facts one by one, without how tensors lie in memory."""
        facts: list[Any] = []
        for fact in self.key:
            facts += fact.facts if type(fact) is Noted else (fact,)
        return facts

    @cached_property
    def lengths(self) -> dict[int, int]:
        """The lengths of axes, each with the number that stands for it in :attr:`form`."""
        shapes = (fact for fact in self._flat if type(fact) is torch.Size)
        found = dict.fromkeys((0, 1, *chain(*shapes)))
        return {length: number for number, length in enumerate(found)}

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """The key with numbers for lengths: graphs of other shapes may share it.

        Decisions compare lengths, and divide one by another. So the order of the lengths, and which
        divides which, are part of the form.
        """
        known, lengths = self.lengths.__getitem__, [*self.lengths]
        facts: list[Any]
        facts = [tuple(map(known, f)) if type(f) is torch.Size else f for f in self._flat]
        facts += sorted(range(len(lengths)), key=lengths.__getitem__)
        facts += [n % m == 0 for n, m in product(lengths, lengths[2:])]
        return tuple(facts)

    @cached_property
    def owners(self) -> dict[int, tuple[Module, str]]:
        """The owning module of each parameter of all extended models, and its name there."""
        return owned_by_models()

    # Calls ---------------------------------------------------------------------------------------

    def _note(self, call: Call, index: int) -> list[Edge]:
        """Note the facts about a call; returns where the walk goes on."""
        if call.is_released or call.is_rewired or not call.is_readable:
            raise Unplanned(_why_unreadable(call))
        stored, facts, run = call.stored, self._facts, call.run
        noted = noted_of(call)
        facts += noted, index
        for name in noted.parameters:
            if name in stored.computed:
                facts += map(self._number_of, stored.computed[name])
            else:
                facts.append(self._number_of(stored.tensors[name]))
        facts.append(self._runs.get(run) or self._belongs_to(run))
        further: list[Edge] = []
        for tensor, edge in zip(stored.inputs, call.edges, strict=True):
            facts.append(edge is None)
            if edge is None:
                facts += is_parameter(tensor), tensor.requires_grad, *self._place_of(tensor, call)
            elif edge.level:
                raise Unplanned(OVERWRITTEN)
            else:
                further.append(edge)
        return further

    def _place_of(self, tensor: Tensor, call: Call) -> Iterable[Any]:
        """Where data of a call lie in what its model received, or whether they are a buffer."""
        run = call.run
        if not run.memories:
            rows = None if call.rule.is_loss else rows_of(tensor)
            self._rows += () if rows is None else (rows,)
            return rows is None, self._is_buffer(tensor, call)
        given = () if len(run.inputs) < 2 else tuple([each.span for each in run.inputs])
        receives = run.receives((tensor,))
        is_buffer = not receives and self._is_buffer(tensor, call)
        is_view = not receives and is_by_sample(tensor, *run.sizes)
        return receives, is_buffer, is_view, *[span_of(tensor) == span for span in given]

    def _is_buffer(self, tensor: Tensor, call: Call) -> bool:
        """Whether a tensor has the memory of a buffer of the call's model."""
        model = owner_of(call.module)
        if model not in self._buffers:
            self._buffers[model] = memories_of_buffers(call)
        return has_memory(tensor) and memory_of(tensor) in self._buffers[model]

    def _relations(self, context: Context) -> Iterable[Any]:
        """How rows that calls and models received lie relative to each other in memory.

        Raises:
            Unplanned: What was asked for is about this pass alone.
        """
        if computed_substitutes():
            raise Unplanned("weights are handed over")
        if context.beside:
            raise Unplanned("beside=... is about this pass alone")
        told = () if context.told is None else context.told.facts
        runs = self._runs
        received = [run.rows for run in runs if isinstance(run, ModelRun) and run.rows is not None]
        return *told, *relations([*self._rows, *(received if len(received) > 1 else ())])

    def _number_of(self, parameter: Tensor | None) -> int:
        """The number of a parameter, in the order of the walk."""
        number = self._numbers.get(id(parameter))
        if number is None:
            if not isinstance(parameter, Parameter):
                raise Unplanned("weights are handed over")
            number = self._numbers[id(parameter)] = len(self.parameters)
            self.parameters.append(parameter)
        return number

    def _belongs_to(self, run: Run) -> int:
        """A number for a run of a model that the walk meets; 0 or 1 for none."""
        if run is NO_RUN or run is NO_RUN_OF_RANKS:
            return int(run.is_distributed)
        if not isinstance(run, ModelRun):
            raise Unplanned("the forward pass was recorded by core alone")
        number = self._runs[run] = 2 + len(self._runs)
        self._facts += run.facts
        return number

    # Operations ----------------------------------------------------------------------------------

    def _pass(self, node: Node, region: Region) -> Iterable[Any]:
        """Note an operation; returns where the walk goes on."""
        kind, facts = type(node), self._facts
        if node in self.between:
            facts += kind, self.between[node]
            return []
        self.between[node] = len(self.between)
        if region:
            self._regions[node] = region
        facts.append(kind)
        if kind is LeafNode:
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            facts += leaf.shape, leaf.dtype
            if is_parameter(leaf):
                facts.append(self._number_of(leaf))
            return []
        if type(node) is CopyNode or nodes.is_nested(node):
            is_copy = type(node) is CopyNode
            raise Unplanned(OVERWRITTEN if is_copy else "there are nested tensors")
        for metadata in node._input_metadata:
            facts += metadata.dtype, torch.Size(metadata.shape)
        facts += nodes.settings_of(node)
        if nodes.has_indices(kind):
            self._indexing.append(node)
        edges = node.next_functions
        facts.append(tuple([child is None for child, _ in edges]))
        return [(child, number) for child, number in edges if child is not None]


def inside_of(call: Call, output: Node) -> list[Any]:
    """Facts about the operations inside of a call, of which settings tell nothing.

    Args:
        call: A call whose module calls code of users.
        output: The node of an output of the call.
    """
    inputs = {edge[:2]: ~number for number, edge in enumerate(call.edges) if edge is not None}
    numbers, todo, facts = {output: 0}, [output], list[Any]()
    for node in todo:
        facts += type(node), *nodes.settings_of(node)
        if call.is_readable and nodes.has_indices(type(node)):
            facts.append(nodes.axes_indexed(node))
        facts += [torch.Size(metadata.shape) for metadata in node._input_metadata]
        for child, number in node.next_functions:
            if child is None or (child, number) in inputs:
                facts.append(None if child is None else inputs[child, number])
                continue
            if child not in numbers:
                numbers[child] = len(todo)
                todo.append(child)
            facts += numbers[child], number
    return facts


def _why_unreadable(call: Call) -> str:
    if call.is_rewired:
        return OVERWRITTEN
    if call.is_released:
        return "a part of the graph was freed"
    return "hooks take what autograd saves, as those of a checkpoint do"
