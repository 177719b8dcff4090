"""Backward passes in an order of our own: for chunks of columns, and without autograd.

Exact quantities have a column for every output of the model. All of them at once would be the
largest tensors of the backward pass. While the loss is visited, the whole graph is still alive. So
all chunks but the last go through it at once, one after the other; the last travels with autograd.
This saves memory, and time: small chunks reuse memory that the allocator holds.

Otherwise autograd drives a pass: its hooks call ``engine/schedule.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.autocast import without_autocast
from backpack_core.contract.extension import Extension
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.between import Between
from backpack_core.engine.groups import Group
from backpack_core.engine.schedule import Schedule
from backpack_core.engine.sink import Sink, Values, combined
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Call, CallCaches, Site
from backpack_core.record.nested import iter_tensors
from backpack_core.record.storage import storage
from backpack_core.tuning import memory_budget
from backpack_operations.nodes import NodeOutput
from backpack_operations.order import ranks
from backpack_operations.straight import StraightTraversal
from backpack_products.tuning import column_budget


class OwnOrder(Schedule):
    """A schedule that visits nodes in a given topological order."""

    def __init__(
        self, between: Between[Any], groups: Sequence[Group], ranks: dict[Node, int]
    ) -> None:
        """Begin.

        Args:
            between: Takes what is sent to nodes between calls.
            groups: The groups whose quantities are sent.
            ranks: The number of each node in the order.
        """
        super().__init__(between, groups)
        self._ranks = ranks
        self._queue: list[tuple[int, Node]] = []
        self._sites: dict[Node, dict[tuple[Call, int], Site]] = {}

    def await_node(self, node: Node) -> None:
        """Queue a node."""
        heapq.heappush(self._queue, (self._ranks[node], node))

    def await_site(self, site: Site) -> None:
        """Queue an output of a call."""
        self._sites.setdefault(site.edge.node, {})[site.call, site.index] = site
        self.await_node(site.edge.node)

    def run(self, visit: Callable[[Site], None]) -> None:
        """Visit calls and cross nodes, in order, until nothing waits."""
        while self._queue:
            _, node = heapq.heappop(self._queue)
            for site in self._sites.pop(node, {}).values():
                visit(site)
            self.between.cross(self, node)
        self.see_end()


# Passes without autograd -------------------------------------------------------------------------


def visit_all(
    run: BackwardPass, order: dict[Node, int], gradients: Mapping[NodeOutput, Tensor]
) -> None:
    """Visit every call of a pass without running autograd.

    Args:
        run: The pass, before autograd has begun.
        order: The number of every node in the order.
        gradients: The gradient at each loss.
    """
    run.is_running = run.is_alone = True
    schedule: Any = OwnOrder(run.between, run.groups, order)
    schedule.chunks = run.schedule.chunks
    run.schedule = run.traversal.schedule = schedule

    def visit(site: Site) -> None:
        run.visit(site, gradients.get(site.edge[:2]), None)

    with torch.no_grad(), without_autocast():
        for site in run.survey.sites.values():  # a call to which nothing is sent is an error
            schedule.await_site(site)
        schedule.run(visit)


# Chunks of columns -------------------------------------------------------------------------------


class ChunkSink(Sink):
    """Collects the values of one chunk of columns.

    A chunk may reach only some uses of a parameter. They are read when the chunk is through.
    """

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        self._values: Values = {}

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Collect a value of one parameter."""
        self._values[extension, id(parameter)] = value

    def add_to(self, partial: Values) -> None:
        """Read parameters that wait for further uses; combine all values into ``partial``."""
        for group, view, uses in self._pending.values():
            for reading in uses[1]:
                reading.is_part = True
            self._complete(group, view, [uses])
        self._pending.clear()
        for key, value in self._values.items():
            partial[key] = combined(partial, key, value)


@dataclass(eq=False)
class Chunks:
    """Sends chunks of columns during one backward pass.

    Attributes:
        between: What lies between calls, and the survey.
        groups: The groups whose quantities are sent.
        kept: What was computed from calls alone, for all columns that pass through them.
        partial: The results of the chunks so far, combined.
        traversal: The class whose methods visit calls.
    """

    between: Between[Any]
    groups: Sequence[Group]
    kept: CallCaches
    partial: Values
    traversal: type[StraightTraversal]
    _ranks: dict[Node, int] = field(default_factory=dict)
    _within: Callable[[int], AbstractContextManager[Any]] = field(
        default_factory=lambda: storage().chunks()
    )

    def size(self, lane: int, device: str) -> int | None:
        """How many columns of a group may travel at once on a type of device; ``None`` for all."""
        group = self.groups[lane]
        survey: Survey = self.between.survey
        extensions = () if group.has_overrides else group.extensions
        if not extensions or not all(e.columns_add for e in extensions):
            return None
        sizes = [e.chunk_size for e in extensions if e.chunk_size is not None]
        if sizes:
            return min(sizes)
        limit = column_budget(device)
        if any(e.per_sample for e in extensions):
            single = sum(use.parameter.nbytes for use in survey.uses.values())
            limit = max(limit, single * survey.batch_size)
        return max(1, limit // max(1, survey.widest))

    def carry(self, lane: int, node: Node, begin: Callable[[StraightTraversal], None]) -> None:
        """Send a chunk through the rest of the net, and combine what extensions read.

        Args:
            lane: The group of the columns.
            node: The node at which the columns are.
            begin: Sends the chunk from there.
        """
        if node not in self._ranks:
            self._ranks = ranks(node)
        schedule = OwnOrder(self.between, self.groups, self._ranks)
        sink = ChunkSink(self.between.survey)
        traversal = self.traversal(schedule, sink)
        with self._within(memory_budget()):
            begin(traversal)
            schedule.run(lambda site: self._visit(traversal, lane, site))
        sink.add_to(self.partial)

    def _visit(self, traversal: StraightTraversal, lane: int, site: Site) -> None:
        """Visit a call with a chunk; keep what the next chunk can reuse, if memory allows."""
        call = site.call
        view = self.between.survey.view(site, self.kept)
        if view.is_checked and self.between.survey.asks_rule(call):
            call.rule.check(view)
        traversal.visit(lane, site, view)
        # Not if it was computed from tensors that saved-tensor hooks provided for this visit.
        held = sum(t.nbytes for t in iter_tensors(list(view.call_cache.values())))
        if view.unpacked is not None or held > memory_budget():
            view.call_cache.clear()
