"""What lies between the calls of a graph: who finds it out, and who carries quantities through it.

Core knows chains of modules with rules, where calls lead to calls (``chain.py``). A library that
knows operations brings a class of its own by the hook ``backpack_operation``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.active import Context
from backpack_core.graph.survey import Survey
from backpack_core.plan.structure import Structure
from backpack_core.record.call import CallCaches, Edge, Site

if TYPE_CHECKING:  # those ask it, and hand themselves over
    from backpack_core.engine.backward import BackwardPass
    from backpack_core.engine.schedule import Schedule
    from backpack_core.engine.sink import FieldSink
    from backpack_core.engine.traversal import Traversal

S = TypeVar("S", bound=Survey)


class Between(ABC, Generic[S]):
    """What lies between the calls of one pass. It must hold neither the pass nor a schedule.

    Attributes:
        survey: What is known about the graph.
        context: What was asked for.
        asked: The propagators that were asked for.
    """

    def __init__(self, context: Context, asked: Sequence[Propagator], survey: S) -> None:
        """Begin; nothing is known about the graph."""
        self.context, self.asked, self.survey = context, asked, survey

    @classmethod
    @abstractmethod
    def of(cls, context: Context, asked: Sequence[Propagator]) -> Between[S]:
        """One for a pass.

        Args:
            context: What was asked for.
            asked: The propagators that were asked for.
        """

    @staticmethod
    @abstractmethod
    def told(samples: Any) -> Any:
        """Check what ``backpack(samples=...)`` was given; the context keeps the result.

        Raises:
            UsageError: It does not say which rows belong to which sample.
        """

    # Before anything is computed ------------------------------------------------------------------

    @abstractmethod
    def look_behind(self, edges: list[Edge]) -> None:
        """Walk the graph behind some edges, and note in the survey what there is.

        Raises:
            BackpackError: There is something that no quantity goes through.
        """

    @abstractmethod
    def see_through(self, edges: list[Edge]) -> None:
        """Find out where samples lie behind edges that were walked; raise for what cannot be right.

        Raises:
            BackpackError: Something that was asked for does not exist in this graph.
        """

    @abstractmethod
    def refuse_terms(
        self,
        roots: Sequence[Edge],
        of_losses: Sequence[Extension],
        divided: Sequence[Extension],
        is_inside: bool,
    ) -> None:
        """Raise unless ``backward()`` is called on what quantities of extended losses know.

        Args:
            roots: What it is called on.
            of_losses: Extensions whose quantity belongs to the extended losses.
            divided: Extensions that need to know what the loss divides by.
            is_inside: Whether it was called in a hook of another pass.

        Raises:
            BackpackError: A term beside extended losses counts, or none is extended.
        """

    @abstractmethod
    def nonlinear(self) -> list[Node]:
        """Operations, with parameters behind, that are not known to be linear."""

    # Plans ----------------------------------------------------------------------------------------

    @abstractmethod
    def facts_of(self, node: Node) -> Sequence[Any]:
        """What decisions about an operation may depend on, besides its type and shapes.

        Raises:
            Unplanned: No plan can tell.
        """

    @abstractmethod
    def numbered(self, structure: Structure) -> Any:
        """What was found out besides calls, with numbers in the place of nodes, or ``None``.

        Raises:
            Unplanned: Numbers do not tell everything.
        """

    @abstractmethod
    def fill(self, numbers: Any, structure: Structure) -> None:
        """The reverse of :meth:`numbered`, for another graph of the same structure."""

    # Visits ---------------------------------------------------------------------------------------

    @abstractmethod
    def traversal(self, schedule: Schedule, sink: FieldSink, kept: CallCaches) -> Traversal:
        """What happens at visits.

        Args:
            schedule: What waits where.
            sink: Where results go.
            kept: What was computed from calls alone.
        """

    @property
    def has_operations(self) -> bool:
        """Whether there are operations between calls. Default: no."""
        return False

    @property
    def needs_autograd(self) -> bool:
        """Whether only autograd knows the way. Default: no."""
        return False

    @property
    def may_begin_passes(self) -> bool:
        """Whether something may begin a pass that modules take part in. Default: no."""
        return False

    def attend(self, run: BackwardPass) -> None:
        """Have autograd call back at places that are no calls. Default: there are none."""
        return

    def is_watched(self, site: Site) -> bool:
        """Whether a call is looked at although nothing is read there. Default: no."""
        return False

    def reach(
        self,
        run: BackwardPass,
        site: Site,
        grads: Sequence[Tensor | None],
        changed_by: Sequence[Any] | None,
    ) -> None:
        """Autograd has reached an output of a call; default: visit it.

        Args:
            run: The pass.
            site: The place.
            grads: The gradients that autograd goes on with at its node; ``None`` for zero.
            changed_by: See :meth:`BackwardPass.visit`.
        """
        run.visit(site, grads[site.edge.output_nr], changed_by)

    def end(self, run: BackwardPass) -> None:
        """Autograd is through: visit what it did not get to. Default: there is nothing."""
        return

    @abstractmethod
    def leave(self, schedule: Schedule, lane: int, edge: Edge, wide: Any, own: Any) -> None:
        """Take what was sent to an edge at which there is no call; see :meth:`Schedule.leave`."""

    @abstractmethod
    def cross(self, schedule: Schedule, node: Node, grads: Sequence[Tensor | None] = ()) -> None:
        """Carry what waits at a node through it, and send it on.

        Args:
            schedule: Where it waits.
            node: The node.
            grads: The gradients at its outputs, if autograd is at the node.
        """
