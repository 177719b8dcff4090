"""Carries columns through the graph in chunks, in an order of our own.

An exact quantity has a column for every output of the model, and all of them at once are the
largest tensors of the backward pass. When the loss is visited, the whole graph is still alive: so
all chunks of columns but the last go through it one after the other, and the last one rides with
autograd as usual. Besides memory this saves time, since small chunks stay in the allocator's reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.extension import Extension
from backpack_core.engine.carriers import Carrier
from backpack_core.engine.traversal import Pending, Traversal
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Site
from backpack_core.record.structure import iter_tensors
from backpack_core.record.view import View
from backpack_core.tuning import column_budget, memory_budget

Values = dict[tuple[Extension, int], Any]  # by extension, and id of the parameter


def chunk_size(extensions: Sequence[Extension], survey: Survey, device: torch.device) -> int | None:
    """How many columns to carry at once; ``None`` for all.

    Args:
        extensions: Those that share the columns.
        survey: What is known about the net.
        device: Where the columns are.
    """
    if not extensions or not all(e.columns_add for e in extensions):
        return None
    asked = [e.chunk_size for e in extensions if e.chunk_size is not None]
    if asked:
        return min(asked)
    limit = column_budget(device.type)
    if any(e.per_sample for e in extensions):
        limit = max(limit, survey.weights * survey.batch_size)
    return max(1, limit // max(1, survey.widest))


class Sweep(Traversal):
    """One chunk of columns on its way through the graph."""

    def __init__(self, owner: Traversal, slot: int, ranks: dict[Node, int]) -> None:
        super().__init__(owner.survey, owner.groups)
        self.kept = owner.kept
        self._slot = slot
        self._ranks = ranks
        self._queue: list[tuple[int, Node]] = []
        self._sites: dict[Node, list[Site]] = {}
        self._values: Values = {}

    def run(self, begin: Callable[[Sweep], None], partial: Values) -> None:
        """Visit everything that columns reach, and add what extensions read off.

        Args:
            begin: Sends the chunk on its way.
            partial: What earlier chunks gave; changed.
        """
        begin(self)
        while self._queue:
            _, node = heapq.heappop(self._queue)
            for waiting in self._sites.pop(node, ()):
                self._visit(waiting)
            self.cross(node)
        for pending in list(self._pending.values()):
            self.complete(self._slot, pending)
        self._pending.clear()
        assert self.is_empty(), "a chunk of columns was left on its way"
        for key, value in self._values.items():
            before = partial.get(key)
            partial[key] = value if before is None else key[0].combine(before, value)

    def _visit(self, site: Site) -> None:
        call = site.call
        kept = self.kept.setdefault(call, {})
        axis = call.rule.batch_axis(View(call, site.index), site.index)
        view = View(call, site.index, None, site.edge.node, axis, kept)
        call.rule.check(view)
        self.visit(self._slot, site, view)
        # What depends on the call alone serves the next chunk, too, as far as memory allows.
        if sum(t.nbytes for t in iter_tensors(list(kept.values()))) > memory_budget():
            kept.clear()

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Keep the value until the chunk is through."""
        self._values[extension, id(parameter)] = value

    def is_complete(self, pending: Pending) -> bool:
        """Of a parameter with several uses, a chunk may reach some only: read at its end."""
        return self.survey.uses[id(pending.parameter)].count == 1

    def await_node(self, node: Node) -> None:
        """Put it in its place of the order."""
        heapq.heappush(self._queue, (self._ranks[node], node))

    def await_site(self, site: Site) -> None:
        """Put it in its place of the order."""
        self._sites.setdefault(site.edge.node, []).append(site)
        self.await_node(site.edge.node)

    def shed(self, slot: int, site: Site, view: View, carrier: Carrier, quantity: Any) -> Any:
        """Nothing: the chunk is small enough."""
        return quantity

    def add_residuals(self, slot: int, site: Site, view: View, inputs: dict[int, Any]) -> None:
        """None: they are not these columns'."""
