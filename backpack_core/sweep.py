"""Carries columns through the graph in chunks, in an order of our own. Imports traversal.

An exact quantity has a column for every output of the model, and all of them at once are the
largest tensors of the backward pass. When the loss is visited, the whole graph is still alive: so
all chunks of columns but the last go through it one after the other, and the last one rides with
autograd as usual. Besides memory this saves time, since small chunks stay in the allocator's reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from backpack_core.calls import Edge, ModuleCall, Node, iter_tensors, records_at
from backpack_core.columns import Columns
from backpack_core.errors import UnsupportedError
from backpack_core.extension import Extension
from backpack_core.ops import memory_budget
from backpack_core.registry import Resolved, registry
from backpack_core.survey import Survey, own_edge
from backpack_core.traversal import Traversal


@dataclass(frozen=True)
class Stop:
    """A place to visit: an output of a call, or (``call`` is ``None``) a node between calls."""

    node: Node
    output_nr: int = 0
    call: ModuleCall | None = None
    index: int = 0


# Bytes of the widest columns that are carried at once on a CPU. A tensor of more than 32 MiB is
# fresh memory for every operation, which takes page faults; some need a little more than that.
HEAP = 26 * 2**20


def chunk_size(
    extensions: tuple[Extension, ...], survey: Survey, device: torch.device
) -> int | None:
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
    limit = min(HEAP, memory_budget()) if device.type == "cpu" else memory_budget()
    if any(e.per_sample for e in extensions):
        limit = max(limit, survey.weights * survey.batch_size)
    return max(1, limit // max(1, survey.widest))


def visiting_order(edge: Edge) -> list[Stop]:
    """Everything behind an edge, consumers before producers."""
    finished: dict[Stop, None] = {}
    stack: list[tuple[Stop, bool]] = [(_stop(edge), False)]
    opened: set[Stop] = set()
    while stack:
        stop, is_done = stack.pop()
        if is_done:
            finished[stop] = None
        elif stop not in opened:
            opened.add(stop)
            stack.append((stop, True))
            stack += [(_stop(e), False) for e in _behind(stop)]
    return list(reversed(finished))


def _stop(edge: Edge) -> Stop:
    assert edge.node is not None
    if not edge.depth:
        return Stop(edge.node)
    call, index = records_at(edge.node, edge.output_nr)[edge.depth - 1]
    return Stop(edge.node, edge.output_nr, call, index)


def _behind(stop: Stop) -> list[Edge]:
    if stop.call is None:
        return [
            Edge(node, number, len(records_at(node, number)))
            for node, number in stop.node.next_functions
            if node is not None
        ]
    if stop.call.is_rewired or registry.resolve(stop.call.module).rule.transparent:
        return [Survey.below(stop.call, stop.node, stop.output_nr)]
    return [own_edge(edge, stop.node) for edge in stop.call.edges if edge is not None]


class Sweep(Traversal):
    """One chunk of columns on its way through the graph."""

    def __init__(
        self, owner: Traversal, slot: int, partial: dict[tuple[Extension, int], Any]
    ) -> None:
        super().__init__(owner.survey, owner.groups)
        self._slot = slot
        self._partial = partial
        self._kept = 0
        self._values: dict[tuple[Extension, int], Any] = {}

    def run(self, order: list[Stop], edge: Edge, columns: Columns) -> None:
        """Visit everything, and add what the extensions read off to the partial results.

        Args:
            order: Where to go, from :func:`visiting_order`.
            edge: Where the columns start.
            columns: The chunk.
        """
        self.deliver(self._slot, own_edge(edge, order[0].node), columns)
        for stop in order:
            if stop.call is None:
                self.cross(stop.node)
            elif self.waits(self._slot, stop.call, stop.index):
                self._visit(stop.call, stop)
        for key, value in self._values.items():
            extension = key[0]
            before = self._partial.get(key)
            self._partial[key] = value if before is None else extension.combine(before, value)

    def _visit(self, call: ModuleCall, stop: Stop) -> None:
        call._check_released()
        before, call.output_nr = call.output_nr, stop.index
        resolved = registry.resolve(call.module)
        resolved.rule.check(call)
        output = (stop.node, stop.output_nr)
        self.compute_slot(self._slot, resolved, call, stop.index, output)
        call.memo.clear()
        call.output_nr = before
        # What depends on the call alone serves the next chunk, too, as far as memory allows.
        self._kept += sum(t.nbytes for t in iter_tensors(list(call.constants.values())))
        if self._kept > memory_budget():
            call.constants.clear()

    def store(self, extension: Extension, parameter: Parameter, value: Any) -> None:
        """Keep the value until the chunk is through: a later call may restate it."""
        self._values[extension, id(parameter)] = value

    def await_node(self, node: Node) -> None:
        """The order of the visits sees to it."""

    def start(
        self, slot: int, resolved: Resolved, call: ModuleCall, output: tuple[Node, int]
    ) -> Any:
        """Never: columns start at the loss that is being visited."""
        raise UnsupportedError(f"{call.path} is a loss behind a loss.")
