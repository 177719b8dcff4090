"""Where quantities wait until everything that adds to them has been visited.

What is sent to a call waits until a driver visits the call. What is sent to a node between calls
waits until the node is crossed, which a subclass arranges: by a hook of autograd, or in an order of
its own.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from backpack_core import _torch
from backpack_core._torch import Node
from backpack_core.autocast import without_autocast
from backpack_core.engine.between import Between
from backpack_core.engine.groups import Group
from backpack_core.errors import InternalError
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Call, Edge, Site

T = TypeVar("T")
Passes = WeakValueDictionary[int, Any]  # passes under way, by autograd's graph-task id


class Waiting(NamedTuple):
    """What was sent to a call, in the two forms that senders use.

    Attributes:
        wide: The quantity of the whole batch, from nodes between calls.
        own: The quantity of the samples that take part (``subsampling``), from calls.
    """

    wide: Any = None
    own: Any = None


NOTHING = Waiting()


class Schedule(ABC):
    """What waits at calls and at nodes, for each group.

    Attributes:
        between: Takes what is sent to nodes between calls.
        at_nodes: What waits at nodes, by lane and by the number of the node's output.
        chunks: Sends columns that do not fit into memory in chunks, if a library has set it.
        task: Autograd's graph task, once it has begun; -1 in an order of our own.
        cross: Carries what waits at a node through it: :meth:`Between.cross`, unless a driver has
            put something around it.
    """

    chunks: Any = None
    task: int = -1

    def __init__(self, between: Between[Any], groups: Sequence[Group]) -> None:
        self.between, self.cross = between, between.cross
        self.survey: Survey = between.survey
        self.groups = groups
        self._at_sites: dict[tuple[Call, int, int], Waiting] = {}
        self.at_nodes: dict[Node, dict[int, dict[int, Any]]] = {}
        self.hooks: list[Any] = []  # from before autograd began

    @abstractmethod
    def await_node(self, node: Node) -> None:
        """Something waits at a node for the first time: arrange that the node is crossed."""

    def await_site(self, site: Site) -> None:
        """Something waits at a call for the first time. Default: autograd will visit it."""
        return

    def waiting_at(self, site: Site) -> list[int]:
        """The lanes in which something waits at an output of a call."""
        lanes = range(len(self.groups))
        return [lane for lane in lanes if (site.call, site.index, lane) in self._at_sites]

    @property
    def inside(self) -> list[bool]:
        """Whether a function began each pass inside of this one. Default: there are none."""
        return []

    def see_end(self) -> None:
        """Raise unless everything that was sent has been taken.

        Raises:
            InternalError: A result would miss it.
        """
        if self._at_sites or self.at_nodes:
            raise InternalError("A quantity was left on its way.")

    def deliver(self, lane: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """Send a quantity to an edge, if the pass gets there.

        Args:
            lane: The index of the group.
            edge: The output of a call, or of a node between calls.
            wide: See :class:`Waiting`.
            own: See :class:`Waiting`.
        """
        if _torch.will_execute(edge.node):
            self.leave(lane, edge, wide, own)

    def leave(self, lane: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """Send a quantity to an edge that the pass is known to reach."""
        site = self.survey.site_at(edge)
        if site is None:
            self.between.leave(self, lane, edge, wide, own)
            return
        key = (site.call, site.index, lane)
        before = self._at_sites.get(key)
        if before is None:
            self.await_site(site)
            self._at_sites[key] = Waiting(wide, own)
        else:
            merge = self.groups[lane].propagator.merge
            self._at_sites[key] = Waiting(
                add(merge, before.wide, wide), add(merge, before.own, own)
            )

    def take(self, lane: int, site: Site) -> Waiting:
        """Take what waits at an output of a call that is being visited."""
        return self._at_sites.pop((site.call, site.index, lane), NOTHING)


class HookSchedule(Schedule):
    """A schedule in autograd's order: a hook tells when autograd is at a node."""

    def __init__(self, between: Between[Any], groups: Sequence[Group], passes: Passes) -> None:
        """Begin.

        Args:
            between: Takes what is sent to nodes between calls.
            groups: The groups whose quantities are sent.
            passes: The passes under way by graph task; a pass that fails is removed.
        """
        super().__init__(between, groups)
        self.passes = passes
        self._begun = threading.get_ident(), 1 + len(_torch.running_passes())

    def begin(self) -> None:
        """Note the graph task: autograd has begun the pass already."""
        self.task = _torch.graph_task_id()
        self._begun = threading.get_ident(), len(_torch.running_passes())

    @property
    def inside(self) -> list[bool]:
        """For each pass inside of this one, innermost first, whether a function began it."""
        (thread, own), found = self._begun, _torch.running_passes()
        return found[: max(0, len(found) - own)] if thread == threading.get_ident() else found

    def is_in(self, task: int) -> bool:
        """Whether a graph task is that of this pass, and not of one that a hook has begun."""
        if self.task < 0 and not self.inside:
            self.task = task
        return self.task == task

    def await_node(self, node: Node) -> None:
        """Have autograd call back when it has visited all consumers of the node."""
        when_reached(node, self, HookSchedule.reach, self)

    def reach(self, grads: Any) -> None:
        """Autograd is at a node: cross it."""
        self.cross(self, _torch.current_node(), grads)


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


def guarded(passes: Passes, function: Callable[..., None], *args: Any) -> None:
    """Call a function in a hook of autograd; if it raises, the pass under way is over."""
    try:
        if _torch.casts():
            with without_autocast():  # the precision was chosen in the forward pass
                function(*args)
        else:
            function(*args)
    except BaseException:
        passes.pop(_torch.graph_task_id(), None)
        raise


def add(merge: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """The sum of two quantities, either of which may be ``None``."""
    if first is None or second is None:
        return second if first is None else first
    return merge(first, second)
