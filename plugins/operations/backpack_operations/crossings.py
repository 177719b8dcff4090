"""Carries quantities through the nodes between calls where they wait, and sends them on.

A quantity waits until autograd (or a chunk's own order) gets to the node, so that everything that
is sent to the node has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from reprlib import repr as abridged
from typing import Any

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.location import place_between
from backpack_core.engine.schedule import add
from backpack_core.errors import ShapeError
from backpack_core.graph import is_leaf
from backpack_core.record.call import Edge
from backpack_operations import nodes
from backpack_operations._torch import will_get_to
from backpack_operations.alignment import Crossing
from backpack_operations.of_weights import Origins
from backpack_operations.order import children_of
from backpack_operations.schedule import NodeSchedule
from backpack_operations.survey import GraphSurvey, edges_behind
from backpack_operations.viewed import has_call

Sent = list[tuple[int, Any]]  # quantities, each with its position in ``node.next_functions``


class Crossings:
    """The crossings of one backward pass, in autograd's order and in chunks."""

    def __init__(self, survey: GraphSurvey) -> None:
        self._survey, self._alignment = survey, survey.alignment
        self._started: set[Node] = set()
        # Whether anything is read at or behind a node; by two properties of propagators, and with
        # the number of leaves at the time.
        self._is_read: dict[tuple[bool, bool], tuple[dict[Node, bool], int]] = {}

    def leave(self, schedule: NodeSchedule, lane: int, edge: Edge, wide: Any, own: Any) -> None:
        """Have a quantity wait at a node; see :meth:`Schedule.leave`."""
        propagator = schedule.groups[lane].propagator
        if not self._leads_to_readers(edge.node, propagator):
            return
        if own is not None:
            widened = propagator.widen(own, self._survey.batch_size)
            wide = add(propagator.merge, wide, widened)
        if edge.node not in schedule.at_nodes:
            schedule.at_nodes[edge.node] = {}
            schedule.await_node(edge.node)
        waiting = schedule.at_nodes[edge.node].setdefault(lane, {})
        waiting[edge.output_nr] = add(propagator.merge, waiting.get(edge.output_nr), wide)

    def _leads_to_readers(self, start: Node, propagator: Propagator) -> bool:
        """Whether a call, or a parameter that operations use, lies at a node or behind it.

        The dye goes on to the nodes where columns begin to be kept apart.
        """
        alignment, todo = self._alignment, [start]
        key = propagator.keeps_apart, propagator.starts_everywhere
        is_read, leaves = self._is_read.get(key, ({}, 0))
        if len(alignment.leaves) != leaves:  # a later walk found more
            if key[0]:
                is_read.update((leaf, True) for leaf, _ in alignment.leaves)
            elif key[1]:
                is_read.update(dict.fromkeys(alignment.starts, True))
        self._is_read[key] = is_read, len(alignment.leaves)
        while todo:
            node = todo[-1]
            if node not in is_read:
                children = children_of(node)
                if has_call(node) or any(is_read.get(child) for child in children):
                    is_read[node] = True
                elif new := [child for child in children if child not in is_read]:
                    todo += new
                    continue
                else:
                    is_read[node] = False
            todo.pop()
        return is_read[start]

    def cross(
        self, schedule: NodeSchedule, node: Node, grads: Sequence[Tensor | None] = ()
    ) -> None:
        """Carry what waits at a node through it, and send it on; see :meth:`Operations.cross`."""
        waiting = schedule.at_nodes.pop(node, {})
        alignment = self._alignment
        is_start = node in alignment.starts or node in alignment.later
        if grads and is_start and node not in self._started:
            self._started.add(node)
            waiting = {lane: waiting.get(lane, {}) for lane in range(len(schedule.groups))}
            grads = nodes.filled(node, grads)
        if not waiting:
            return
        there = alignment.crossing(node)
        if there.apart_outputs and there.apart:
            there = there._replace(is_table=Origins(self._survey).of_weights(node))
        for lane, quantities in waiting.items():
            group = schedule.groups[lane]
            try:
                quantities = group.propagator.supply(quantities, grads)
                if nodes.hands_on(node) and not (there.apart or there.apart_outputs):
                    crossed = list(quantities.items())
                else:
                    is_reached = grads and group.propagator.sheds_everywhere
                    here = (
                        self._reached(schedule, lane, node, grads, there) if is_reached else there
                    )
                    crossed = group.propagator.cross(node, quantities, here) if quantities else []
                    crossed = _as_pairs(group.propagator, node, crossed)
            except Exception as error:
                place_between(error, self._survey, group.first, node)
                raise
            self._send(schedule, lane, node, crossed)

    def _reached(
        self,
        schedule: NodeSchedule,
        lane: int,
        node: Node,
        grads: Sequence[Tensor | None],
        there: Crossing,
    ) -> Crossing:
        """The crossing of a node that autograd has reached, with its gradients and chunks.

        Residuals of operations need the gradients, and may be too large to travel at once.
        """
        chunks = schedule.chunks
        if chunks is None:
            return there
        size = partial(chunks.size, lane, node._input_metadata[0].device.type)

        def carry(part: Sent) -> None:
            chunks.carry(lane, node, lambda sweep: self._send(sweep.schedule, lane, node, part))

        return there._replace(grads=grads, size=size, carry=carry)

    def _send(self, schedule: NodeSchedule, lane: int, node: Node, crossed: Sent) -> None:
        """Send quantities that crossed a node along the edges behind it."""
        edges = dict(edges_behind(node)) if crossed else {}
        for position, quantity in crossed:
            edge = edges.get(position)
            if edge is not None:
                self._send_to(schedule, lane, edge, quantity)

    def _send_to(self, schedule: NodeSchedule, lane: int, edge: Edge, quantity: Any) -> None:
        """Send a quantity along an edge, to a call, a node, or a parameter that operations use."""
        leaf = self._alignment.leaves.get((edge.node, edge.output_nr))
        if leaf is None:
            if not is_leaf(edge.node):  # other parameters are read at calls
                schedule.deliver(lane, Edge(edge.node, edge.output_nr), wide=quantity)
        elif schedule.groups[lane].propagator.keeps_apart and will_get_to(edge.node):
            schedule.leave(lane, edge, wide=quantity)


def _as_pairs(propagator: Propagator, node: Node, crossed: Any) -> Sent:
    """What a propagator returned for a node, if it is right.

    Raises:
        ShapeError: It is not a list of pairs, or names a position that the node does not have.
    """
    number = len(node.next_functions)
    try:
        pairs = [(position, quantity) for position, quantity in crossed]
        if all(0 <= position < number for position, _ in pairs):
            return pairs
    except (TypeError, ValueError):
        pass
    raise ShapeError(
        f"{type(propagator).__name__}.cross returned {abridged(crossed)} at {node.name()}, "
        f"expected pairs: a position in its {number} next_functions, and the quantity there."
    )
