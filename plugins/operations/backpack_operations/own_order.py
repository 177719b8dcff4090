"""Backward passes in this library's own order: for chunks of columns, and without autograd.

Exact quantities have a column for every output of the model. All of them at once would be the
largest tensors of the backward pass. While the loss is visited, the whole graph is still alive. So
all chunks but the last go through it at once, one after the other; the last travels with autograd.
This saves memory, and time: small chunks reuse memory that the allocator holds.

Otherwise autograd drives a pass; both orders are in ``schedule.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.autocast import without_autocast
from backpack_core.engine.active import Group
from backpack_core.record.call import CallCaches, Site
from backpack_core.record.nested import iter_tensors
from backpack_core.record.storage import storage
from backpack_operations.nodes import NodeOutput
from backpack_operations.order import ranks
from backpack_operations.schedule import NodeSchedule, OwnOrder
from backpack_operations.sink import ChunkSink, Values
from backpack_operations.straight import StraightTraversal
from backpack_products.tuning import column_budget, memory_budget

if TYPE_CHECKING:
    from backpack_operations.between import Operations  # which imports this file
    from backpack_operations.passes import GraphPass  # which imports this file


# Passes without autograd -------------------------------------------------------------------------


def visit_all(
    run: GraphPass, order: dict[Node, int], gradients: Mapping[NodeOutput, Tensor]
) -> None:
    """Visit every call of a pass without running autograd.

    Args:
        run: The pass, before autograd has begun.
        order: The number of every node in the order.
        gradients: The gradient at each loss.
    """
    between, hooked = run.between, cast("NodeSchedule", run.schedule)
    schedule = OwnOrder(between, run.groups, order)
    schedule.chunks, schedule.cross = hooked.chunks, hooked.cross
    run.schedule = run.traversal.schedule = schedule

    with _alone(run, gradients) as visit:
        for site in run.survey.sites.values():  # a call to which nothing is sent is an error
            schedule.await_site(site)
        schedule.run(visit)


def drive_all(run: GraphPass, gradients: Mapping[NodeOutput, Tensor]) -> None:
    """The same as :func:`visit_all`, if the driver of the pass replaces all of its visits."""
    with _alone(run, gradients) as visit:
        for key in run.between.driven or ():
            visit(run.survey.sites[key])


@contextmanager
def _alone(
    run: GraphPass, gradients: Mapping[NodeOutput, Tensor]
) -> Iterator[Callable[[Site], None]]:
    """A block in which outputs are visited by a function, as autograd does not run."""
    run.is_running = run.is_alone = True

    def visit(site: Site) -> None:
        gradient = gradients.get(site.edge[:2])
        driver = run.between.driver
        if driver is None:
            run.visit(site, gradient, None)
        else:
            run.precede(site, gradient)
            driver.reach(run, site, [None] * site.edge.output_nr + [gradient], None)
            run.conclude(site, gradient)

    with torch.no_grad(), without_autocast():
        yield visit


# Chunks of columns -------------------------------------------------------------------------------


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

    between: Operations
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
        survey = self.between.survey
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
