"""Observers that know plans: they say whether a pass may go by one, and may replace its visits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from typing import Any

from backpack_core.contract.observer import Grads, Observer
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.observers import Hooked, Shown
from backpack_operations.plan import Planned
from backpack_operations.structure import Structure


class Driver(ABC):
    """Replaces the visits of a pass that goes by a plan.

    Attributes:
        outputs: The outputs of calls that it visits, in this order; others are ignored, and nothing
            is surveyed. ``None`` if the engine visits calls, too.
    """

    outputs: Collection[tuple[Any, int]] | None = None

    @staticmethod
    def visit(run: Any, site: Any, grads: Grads, others: Any) -> None:
        """Let the engine visit an output, as it would without a driver; see :meth:`reach`."""
        if run.is_alone:
            run.visit(site, grads[site.edge.output_nr], others)
        else:
            run.between.visit(run, site, grads, others)

    @abstractmethod
    def reach(self, run: Any, site: Any, grads: Grads, others: Any) -> None:
        """Called when autograd reaches an output, instead of ``Operations.visit``.

        Observers, such as ``extension_hook``, look at the output before and afterwards.

        Args:
            run: The pass.
            site: The output.
            grads: The gradients with which autograd continues at its node.
            others: Users' hooks on the tensor, if they changed its gradient.
        """

    @abstractmethod
    def end(self, run: Any) -> None:
        """Called when autograd is done.

        Raises:
            InternalError: An output that it must visit was not reached.
        """


class PlanObserver(Observer):
    """An observer of passes that may go by a plan. Others agree to any plan, and see all visits.

    The methods are called before those of :class:`Observer`, in this order.

    Attributes:
        needs_visits: Whether it looks at visits, or adds to them, in passes with a known plan, so
            that no driver may replace them.
        needs_survey: Whether it asks the survey for more than sites, even where a driver replaces
            the visits.
        kept: What the plan of the pass keeps for later observers of this class; ``None`` for
            nothing.
    """

    needs_visits: bool = True
    needs_survey: bool = False
    kept: Any = None

    def goes_by(self, kept: Any) -> bool:
        """Whether the pass may use the plan of an earlier pass, and so survey nothing.

        Args:
            kept: What an earlier observer of this class left in the plan; ``None`` if nothing.
        """
        return True

    def drive(self, run: BackwardPass, planned: Planned, structure: Structure) -> Driver | None:
        """A driver that replaces the visits of a pass with a known plan; ``None`` for the engine.

        Args:
            run: The pass, before anything is surveyed.
            planned: The plan that it uses.
            structure: The structure of its graph.
        """
        return None

    def goes_alone(self, run: BackwardPass, planned: Planned, structure: Structure) -> bool:
        """Whether :meth:`instead` will make all visits of a pass with a known plan.

        The arguments are those of :meth:`drive`.
        """
        return False

    def adds(self, run: BackwardPass) -> Hashable:
        """What its own extensions read in a pass with a known plan; ``None`` for nothing.

        A driver that serves passes in which this is the same may replace the visits.

        Args:
            run: The pass, before anything is surveyed.
        """
        return None


def of_plans(run: BackwardPass) -> list[PlanObserver]:
    """The observers of a pass that know plans."""
    return [observer for observer in run.observers if isinstance(observer, PlanObserver)]


def looks_at_visits(run: BackwardPass) -> bool:
    """Whether any observer must see the engine's visits.

    The arguments ``observer`` and ``extension_hook`` are called before and after each visit,
    whoever makes it.
    """
    others = [o for o in run.observers if not isinstance(o, (Hooked, Shown))]
    needs_visits = any(not isinstance(o, PlanObserver) or o.needs_visits for o in others)
    return needs_visits or run.context.debug
