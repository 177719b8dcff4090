"""Where quantities wait at operations between calls, until all that is sent there has arrived.

What waits at a node is carried on when a driver crosses the node: in autograd's order, where a hook
tells that autograd is there, or in an order of our own.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from backpack_core import _torch
from backpack_core._torch import Node
from backpack_core.engine.active import Group
from backpack_core.engine.schedule import Passes, Schedule, guarded
from backpack_core.errors import InternalError
from backpack_core.record.call import Call, Edge, Site

if TYPE_CHECKING:
    from backpack_operations.between import Operations  # which imports this file

T = TypeVar("T")


class NodeSchedule(Schedule):
    """What waits at calls and at nodes, for each group.

    Attributes:
        at_nodes: What waits at nodes, by lane and by the number of the node's output.
        chunks: Sends columns that do not fit into memory in chunks.
        cross: Carries what waits at a node through it: :meth:`Operations.cross`, unless a driver
            has put something around it.
    """

    between: Operations
    at_nodes: dict[Node, dict[int, dict[int, Any]]]
    cross: Callable[..., None]
    chunks: Any = None

    @abstractmethod
    def await_node(self, node: Node) -> None:
        """Something waits at a node for the first time: arrange that the node is crossed."""

    def waiting_at(self, site: Site) -> list[int]:
        """The lanes in which something waits at an output of a call."""
        lanes = range(len(self.groups))
        return [lane for lane in lanes if (site.call, site.index, lane) in self._at_sites]

    def forget(self, lane: int, edge: Edge) -> None:
        """Let go of what waits at an edge, if autograd had no need to get there."""
        site, waiting = self.survey.site_at(edge), self.at_nodes.get(edge.node, {})
        if site is not None:
            self.take(lane, site)
        elif waiting.pop(lane, None) is not None and not waiting:
            del self.at_nodes[edge.node]

    def see_end(self) -> None:
        """Raise an error unless everything that was sent has been taken; see the base class."""
        if self._at_sites or self.at_nodes:
            raise InternalError("A quantity was left on its way.")


class HookSchedule(NodeSchedule):
    """A schedule in autograd's order: a hook tells when autograd is at a node."""

    def __init__(self, between: Operations, groups: Sequence[Group]) -> None:
        super().__init__(between, groups)
        self.at_nodes, self.cross = {}, between.cross
        self.passes: Passes = between.context.passes
        self.hooks: list[Any] = []

    def begin(self) -> None:
        """Note the graph task: autograd has begun the pass already."""
        self.task = _torch.graph_task_id()
        self._begun = threading.get_ident(), len(_torch.running_passes())

    def await_node(self, node: Node) -> None:
        """Have autograd call back when it has visited all consumers of the node."""
        when_reached(node, self, HookSchedule.reach, self)

    def reach(self, grads: Any) -> None:
        """Autograd is at a node: cross it."""
        self.cross(self, _torch.current_node(), grads)


class OwnOrder(NodeSchedule):
    """A schedule that visits nodes in a given topological order."""

    def __init__(
        self, between: Operations, groups: Sequence[Group], ranks: dict[Node, int]
    ) -> None:
        """Begin.

        Args:
            between: Takes what is sent to nodes between calls.
            groups: The groups whose quantities are sent.
            ranks: The number of each node in the order.
        """
        super().__init__(between, groups)
        self.at_nodes, self.cross = {}, between.cross
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
            self.cross(self, node)
        self.see_end()


def when_reached(
    node: Node, owner: T, function: Callable[[T, Any], None], schedule: HookSchedule
) -> None:
    """Have autograd call ``function(owner, gradients)`` when it reaches a node.

    Autograd may never get there (``backward(inputs=...)``, an exception), and the hook then stays
    on the node. So the hook holds neither the node nor the owner. A hook that was put there before
    autograd began is removed when the pass is over.
    """
    this, waiting = weakref.ref(owner), weakref.ref(schedule)
    passes = schedule.passes

    def reached(grads: Any) -> None:
        pending = waiting()
        if pending is not None and not pending.is_in(_torch.graph_task_id()):
            return  # autograd is in a pass inside of this one
        handle.remove()
        if (found := this()) is not None:
            guarded(passes, function, found, grads)

    handle = node.register_prehook(reached)
    if schedule.task < 0:
        schedule.hooks.append(handle)
