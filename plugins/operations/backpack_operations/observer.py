"""Observers that know plans: they say whether a pass may go by one, and may replace its visits."""

from __future__ import annotations

from typing import Any

from backpack_core.contract.observer import Driver, Observer
from backpack_core.engine.backward import BackwardPass
from backpack_operations.plan import Planned
from backpack_operations.structure import Structure


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


def of_plans(run: BackwardPass) -> list[PlanObserver]:
    """The observers of a pass that know plans."""
    return [observer for observer in run.observers if isinstance(observer, PlanObserver)]


def looks_at_visits(run: BackwardPass) -> bool:
    """Whether any observer of a pass must see the visits of the engine."""
    return any(not isinstance(o, PlanObserver) or o.needs_visits for o in run.observers)
