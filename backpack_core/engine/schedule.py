"""Where quantities wait until everything that adds to them has been visited.

A :class:`Schedule` does not decide who is visited when. At calls, whoever does takes what waits
there; at nodes between calls, a subclass sees to it that :meth:`Schedule.cross` is called.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

from backpack_core import _torch
from backpack_core._torch import Node
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.groups import Group
from backpack_core.engine.location import place_between
from backpack_core.errors import InternalError
from backpack_core.graph import nodes
from backpack_core.graph.order import children_of
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Call, Edge, Site, is_noted
from backpack_core.values import without_autocast
from backpack_operations.alignment import Crossing

if TYPE_CHECKING:
    from backpack_core.engine.sweep import Chunks  # which make schedules

T = TypeVar("T")
Sent = list[tuple[int, Any]]  # quantities by position in ``node.next_functions``
Passes = WeakValueDictionary[int, Any]  # passes under way, by autograd's graph-task id


class Waiting(NamedTuple):
    """What was sent to a call, in the two forms that senders have.

    Attributes:
        wide: From nodes between calls: for the whole batch.
        own: From calls: for the samples that take part.
    """

    wide: Any = None
    own: Any = None


NOTHING = Waiting()


class Schedule(ABC):
    """What waits at calls and at nodes, for each group."""

    def __init__(self, survey: Survey, groups: Sequence[Group]) -> None:
        self.survey = survey
        self.groups = groups
        self._at_sites: dict[tuple[Call, int, int], Waiting] = {}
        self._at_nodes: dict[Node, dict[int, dict[int, Any]]] = {}
        self._started: set[Node] = set()
        self.hooks: list[Any] = []  # from before autograd began
        # For those that keep samples apart, and for what is measured; with the number of leaves.
        self._is_read: dict[tuple[bool, bool], tuple[dict[Node, bool], int]] = {}

    @abstractmethod
    def await_node(self, node: Node) -> None:
        """Something waits at a node for the first time: have :meth:`cross` called in time."""

    def await_site(self, site: Site) -> None:
        """Something waits at a call for the first time; autograd visits it by itself."""
        return

    def waiting_at(self, site: Site) -> list[int]:
        """The groups for which something waits at an output of a call."""
        lanes = range(len(self.groups))
        return [lane for lane in lanes if (site.call, site.index, lane) in self._at_sites]

    @property
    def inside(self) -> list[bool]:
        """Whether functions began the passes inside of this one; default: there are none."""
        return []

    def see_end(self) -> None:
        """Raise unless everything that was sent has been taken.

        Raises:
            InternalError: A result would miss it.
        """
        if self._at_sites or self._at_nodes:
            raise InternalError("A quantity was left on its way.")

    def deliver(self, lane: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """Send a quantity to an edge, unless the pass does not get there.

        Args:
            lane: The index of the group.
            edge: The address: of a call, or of a node between calls.
            wide: The quantity for the whole batch, as nodes send it.
            own: The quantity for the samples that take part, as calls send it.
        """
        if _torch.will_execute(edge.node):
            self.leave(lane, edge, wide, own)

    def leave(self, lane: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """Send a quantity to an edge that the pass is known to reach."""
        propagator = self.groups[lane].propagator
        site = self.survey.site_at(edge)
        if site is not None:
            key = (site.call, site.index, lane)
            before = self._at_sites.get(key)
            if before is None:
                self.await_site(site)
                self._at_sites[key] = Waiting(wide, own)
            else:
                merge = propagator.merge
                self._at_sites[key] = Waiting(
                    _add(merge, before.wide, wide), _add(merge, before.own, own)
                )
            return
        if not self._leads_to_readers(edge.node, propagator):
            return
        if own is not None:
            widened = propagator.widen(own, self.survey.batch_size)
            wide = _add(propagator.merge, wide, widened)
        if edge.node not in self._at_nodes:
            self._at_nodes[edge.node] = {}
            self.await_node(edge.node)
        waiting = self._at_nodes[edge.node].setdefault(lane, {})
        waiting[edge.output_nr] = _add(propagator.merge, waiting.get(edge.output_nr), wide)

    def _leads_to_readers(self, start: Node, propagator: Propagator) -> bool:
        """Whether a call, or a parameter that is read by itself, lies at a node or behind it.

        What is measured goes as far as samples are.
        """
        alignment, todo = self.survey.alignment, [start]
        key = propagator.keeps_apart, propagator.starts_everywhere
        known, leaves = self._is_read.get(key, ({}, 0))
        if len(alignment.leaves) != leaves:  # a later walk found more
            if key[0]:
                known.update((leaf, True) for leaf, _ in alignment.leaves)
            elif key[1]:
                known.update(dict.fromkeys(alignment.starts, True))
        self._is_read[key] = known, len(alignment.leaves)
        while todo:
            node = todo[-1]
            if node not in known:
                children = children_of(node)
                if is_noted(node) or any(known.get(child) for child in children):
                    known[node] = True
                elif new := [child for child in children if child not in known]:
                    todo += new
                    continue
                else:
                    known[node] = False
            todo.pop()
        return known[start]

    def take(self, lane: int, site: Site) -> Waiting:
        """What waits at an output of a call that is being visited."""
        return self._at_sites.pop((site.call, site.index, lane), NOTHING)

    def cross(self, node: Node, grads: Sequence[Tensor | None] = ()) -> None:
        """Carry what waits at a node through it, and send it on.

        Args:
            node: The node.
            grads: The gradients at its outputs, if autograd is at the node.
        """
        waiting = self._at_nodes.pop(node, {})
        if grads and node in self.survey.alignment.starts and node not in self._started:
            self._started.add(node)
            waiting = {lane: waiting.get(lane, {}) for lane in range(len(self.groups))}
            grads = nodes.filled(node, grads)
        if not waiting:
            return
        there = self.survey.alignment.crossing(node)
        for lane, quantities in waiting.items():
            group = self.groups[lane]
            try:
                quantities = group.propagator.supply(quantities, grads)
                if nodes.hands_on(node) and not there.apart:
                    crossed = list(quantities.items())
                else:
                    is_reached = grads and group.propagator.sheds_everywhere
                    here = self._reached(lane, node, grads, there) if is_reached else there
                    crossed = group.propagator.cross(node, quantities, here) if quantities else []
            except Exception as error:
                place_between(error, self.survey, group.first, node)
                raise
            self.send(lane, node, crossed)

    def _reached(
        self, lane: int, node: Node, grads: Sequence[Tensor | None], there: Crossing
    ) -> Crossing:
        """Where samples lie at a node that autograd is at, and what takes residuals there."""
        return there

    def send(self, lane: int, node: Node, crossed: Sent) -> None:
        """Send what has crossed a node to the edges behind it."""
        edges = dict(edges_behind(node)) if crossed else {}
        for position, quantity in crossed:
            edge = edges.get(position)
            if edge is not None:
                self._send(lane, edge, quantity)

    def _send(self, lane: int, edge: Edge, quantity: Any) -> None:
        """Send what has crossed a node to one edge behind it."""
        leaf = self.survey.alignment.leaves.get((edge.node, edge.output_nr))
        if leaf is None:
            if not nodes.is_leaf(edge.node):  # other parameters are read at calls
                self.deliver(lane, Edge(edge.node, edge.output_nr), wide=quantity)
        elif self.groups[lane].propagator.keeps_apart and _torch.will_get_gradient(leaf):
            self.leave(lane, edge, wide=quantity)


class HookSchedule(Schedule):
    """A schedule in autograd's order: hooks tell when autograd is at a node."""

    def __init__(self, chunks: Chunks, passes: Passes) -> None:
        """Begin.

        Args:
            chunks: Makes sweeps; knows the graph and the groups.
            passes: The passes under way, by graph task, from which a failed one is removed.
        """
        super().__init__(chunks.survey, chunks.groups)
        self._chunks, self.passes = chunks, passes
        self.task = -1  # of autograd's, once that has begun
        self._begun = threading.get_ident(), 1 + len(_torch.running_passes())

    def begin(self) -> None:
        """Autograd is in the pass already."""
        self.task = _torch.graph_task_id()
        self._begun = threading.get_ident(), len(_torch.running_passes())

    @property
    def inside(self) -> list[bool]:
        """Whether functions began the passes inside of this one, known or not; innermost first."""
        (thread, own), found = self._begun, _torch.running_passes()
        return found[: max(0, len(found) - own)] if thread == threading.get_ident() else found

    def is_in(self, task: int) -> bool:
        """Whether one of autograd's tasks is that of this pass; a hook may begin another before."""
        if self.task < 0 and not self.inside:
            self.task = task
        return self.task == task

    def _reached(
        self, lane: int, node: Node, grads: Sequence[Tensor | None], there: Crossing
    ) -> Crossing:
        size = partial(self._chunks.size, lane, node._input_metadata[0].device.type)

        def carry(part: Sent) -> None:
            self._chunks.carry(lane, node, lambda sweep: sweep.schedule.send(lane, node, part))

        return there._replace(grads=grads, size=size, carry=carry)

    def await_node(self, node: Node) -> None:
        """Have autograd call back when it has visited all consumers of the node."""
        when_reached(node, self, HookSchedule.reach, self)

    def reach(self, grads: Any) -> None:
        """Autograd is at a node: cross it."""
        self.cross(_torch.current_node(), grads)


def when_reached(
    node: Node, owner: T, function: Callable[[T, Any], None], schedule: HookSchedule
) -> None:
    """Have autograd call ``function(owner, gradients)`` when it reaches a node.

    It may never get there (``backward(inputs=...)``, an exception), and the hook then stays on the
    node. So it holds neither the node nor the owner. One from before autograd began goes when the
    pass is over, whose owner the traceback of an error may hold for longer.
    """
    this, waiting = weakref.ref(owner), weakref.ref(schedule)
    passes = schedule.passes

    def reached(grads: Any) -> None:
        pending = waiting()
        if pending is not None and not pending.is_in(_torch.graph_task_id()):
            return  # a pass inside of this one
        handle.remove()
        if (found := this()) is not None:
            guarded(passes, function, found, grads)

    handle = node.register_prehook(reached)
    if schedule.task < 0:
        schedule.hooks.append(handle)


def guarded(passes: Passes, function: Callable[..., None], *args: Any) -> None:
    """Call a function in a hook; if it fails, the pass under way is over."""
    try:
        if _torch.casts():
            with without_autocast():  # the precision was chosen in the forward pass
                function(*args)
        else:
            function(*args)
    except BaseException:
        passes.pop(_torch.graph_task_id(), None)
        raise


class RankSchedule(Schedule):
    """A schedule in an order that was made beforehand, for chunks and passes without autograd."""

    def __init__(self, survey: Survey, groups: Sequence[Group], ranks: dict[Node, int]) -> None:
        """Begin.

        Args:
            survey: What is known about the graph.
            groups: The groups whose quantities are sent.
            ranks: The place of each node in the order.
        """
        super().__init__(survey, groups)
        self._ranks = ranks
        self._queue: list[tuple[int, Node]] = []
        self._sites: dict[Node, dict[tuple[Call, int], Site]] = {}

    def await_node(self, node: Node) -> None:
        """Put the node into the queue, at its place in the order."""
        heapq.heappush(self._queue, (self._ranks[node], node))

    def await_site(self, site: Site) -> None:
        """Put the call into the queue, at its place in the order."""
        self._sites.setdefault(site.edge.node, {})[site.call, site.index] = site
        self.await_node(site.edge.node)

    def run(self, visit: Callable[[Site], None]) -> None:
        """Visit calls and cross nodes, in order, until nothing waits."""
        while self._queue:
            _, node = heapq.heappop(self._queue)
            for site in self._sites.pop(node, {}).values():
                visit(site)
            self.cross(node)
        self.see_end()


def _add(merge: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """The sum of two quantities, either of which may be ``None``."""
    if first is None or second is None:
        return second if first is None else first
    return merge(first, second)
