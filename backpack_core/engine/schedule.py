"""Where quantities wait until everything that adds to them has been visited.

What is sent to a call waits until autograd gets there. What is sent to an operation between calls
is left to the library that knows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from backpack_core import _torch
from backpack_core.autocast import without_autocast
from backpack_core.engine.active import Group
from backpack_core.errors import InternalError
from backpack_core.graph import Survey
from backpack_core.record.call import Call, Edge, Site

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


class Schedule:
    """What waits at calls, for each group. A library derives from it.

    Attributes:
        between: Takes what is sent to operations between calls.
        groups: The groups whose quantities are sent.
        task: Autograd's graph task, once it has begun; -1 in an order of our own.
        hooks: Handles of hooks from before autograd began, to be removed at the end.
    """

    task: int = -1
    hooks: Sequence[Any] = ()

    def __init__(self, between: Any, groups: Sequence[Group]) -> None:
        self.between, self.groups = between, groups
        self.survey: Survey = between.survey
        self._at_sites: dict[tuple[Call, int, int], Waiting] = {}
        self._begun = threading.get_ident(), 1 + len(_torch.running_passes())

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

    def await_site(self, site: Site) -> None:
        """Something waits at a call for the first time. Default: autograd will visit it."""

    def see_end(self) -> None:
        """Raise unless everything that was sent has been taken.

        Raises:
            InternalError: A result would miss it.
        """
        if self._at_sites:
            raise InternalError("A quantity was left on its way.")

    def deliver(self, lane: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """Send a quantity to an edge, if the pass gets there.

        Args:
            lane: The index of the group.
            edge: The output of a call, or of a node between calls.
            wide: See :class:`Waiting`.
            own: See :class:`Waiting`.
        """
        node, returned = edge.node, self.between.returned
        if _torch.will_execute(node) and not (node in returned and _torch.is_end(node)):
            self.leave(lane, edge, wide, own)

    def leave(self, lane: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """Send a quantity to an edge that the pass is known to reach."""
        site = self.survey.site_at(edge)
        if site is None:
            self.between.leave(self, lane, edge, wide, own)
            return
        key = (site.call, site.index, lane)
        before = self._at_sites.get(key, NOTHING)
        if before is NOTHING:
            self.await_site(site)
        merge = self.groups[lane].propagator.merge
        wide, own = add(merge, before.wide, wide), add(merge, before.own, own)
        self._at_sites[key] = Waiting(wide, own)

    def take(self, lane: int, site: Site) -> Waiting:
        """Take what waits at an output of a call that is being visited."""
        return self._at_sites.pop((site.call, site.index, lane), NOTHING)


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
    """The sum of two quantities; each may be ``None``."""
    if first is None or second is None:
        return second if first is None else first
    return merge(first, second)
