"""Sends columns through the graph in chunks, each in an order of our own.

An exact quantity has a column for every output of the model; all at once are the largest tensors of
the backward pass. When the loss is visited, the whole graph is still alive. So all chunks but the
last go through it one after the other, and the last one travels with autograd. Besides memory this
saves time: small chunks reuse memory that the allocator holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backpack_core._torch import Node
from backpack_core.engine.between import Between
from backpack_core.engine.groups import Group
from backpack_core.engine.schedule import RankSchedule
from backpack_core.engine.sink import ChunkSink, Values
from backpack_core.graph.order import ranks
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Kept, Site
from backpack_core.record.storage import storage
from backpack_core.record.structure import iter_tensors
from backpack_core.tuning import column_budget, memory_budget

if TYPE_CHECKING:
    from backpack_core.engine.traversal import Traversal


@dataclass(eq=False)
class Chunks:
    """Sends chunks of columns during one backward pass.

    Attributes:
        between: What lies between calls, and what is known about the graph.
        groups: The groups whose quantities are sent.
        kept: What was computed from calls alone, for all columns that pass through them.
        partial: The results of the chunks so far, combined.
    """

    between: Between[Any]
    groups: Sequence[Group]
    kept: Kept
    partial: Values
    _ranks: dict[Node, int] = field(default_factory=dict)
    _within: Callable[[int], AbstractContextManager[Any]] = field(
        default_factory=lambda: storage().chunks()
    )

    def size(self, lane: int, device: str) -> int | None:
        """How many columns may travel at once, on a type of device; ``None`` for all."""
        group = self.groups[lane]
        survey: Survey = self.between.survey
        extensions = () if group.has_overrides else group.extensions
        if not extensions or not all(e.columns_add for e in extensions):
            return None
        asked = [e.chunk_size for e in extensions if e.chunk_size is not None]
        if asked:
            return min(asked)
        limit = column_budget(device)
        if any(e.per_sample for e in extensions):
            limit = max(limit, survey.weights * survey.batch_size)
        return max(1, limit // max(1, survey.widest))

    def carry(self, lane: int, node: Node, begin: Callable[[Traversal], None]) -> None:
        """Visit everything that a chunk reaches, and combine what extensions read.

        Args:
            lane: The group of the columns.
            node: The node at which the columns are.
            begin: Sends the chunk from there.
        """
        if node not in self._ranks:
            self._ranks = ranks(node)
        schedule = RankSchedule(self.between, self.groups, self._ranks)
        sink = ChunkSink(self.between.survey)
        traversal = self.between.traversal(schedule, sink)
        with self._within(memory_budget()):
            begin(traversal)
            schedule.run(lambda site: self._visit(traversal, lane, site))
        sink.add_to(self.partial)

    def _visit(self, traversal: Traversal, lane: int, site: Site) -> None:
        call = site.call
        view = self.between.survey.view(site, self.kept)
        if self.between.survey.asks_rule(call):
            call.rule.check(view)
        traversal.visit(lane, site, view)
        # Keep what depends on the call alone for the next chunk, as far as memory allows; but not
        # if it was made of tensors that hooks took.
        held = sum(t.nbytes for t in iter_tensors(list(view.kept.values())))
        if view.taken is not None or held > memory_budget():
            view.kept.clear()
