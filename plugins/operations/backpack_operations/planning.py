"""Takes the plan of an earlier pass with the same structure, or makes one.

``docs/design/plans.md`` says what a plan is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backpack_core.engine.active import Context
from backpack_core.engine.backward import BackwardPass
from backpack_core.errors import InternalError
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Edge
from backpack_operations.noted import Unplanned
from backpack_operations.observer import of_plans
from backpack_operations.plan import Plan, Planned, plans
from backpack_operations.planned import PlannedFacts, fill
from backpack_operations.structure import Structure

if TYPE_CHECKING:
    from backpack_operations.between import Operations  # which imports this file
    from backpack_operations.passes import GraphPass  # which imports this file


class Planning:
    """The plan of one pass.

    Attributes:
        structure: The structure of its graph; ``None`` if no plan can be made of it.
    """

    def __init__(self, between: Operations, roots: Sequence[Edge]) -> None:
        """Recognise the graph.

        Args:
            between: What lies between the calls of the pass, with a survey that is empty yet.
            roots: What ``backward()`` was called on; empty if that is not known.
        """
        self._between, self._context, self._survey = between, between.context, between.survey
        self._asked = registry.generation, between.asked
        self._known: Planned | None = None
        self._plan: Plan | None = None  # to be kept
        self.structure: Structure | None = None
        try:
            self.structure = _recognised(self._context, roots)
        except Unplanned as why:
            self._context.history[f"surveyed: {why}"] += 1

    def _find(self) -> Planned | None:
        """The plan of earlier passes, if there is one that holds."""
        structure = self.structure
        known = None if structure is None else plans.get(self._asked, structure)
        if known is None or structure is None:
            return None
        facts = known.plan.facts
        if facts is None or facts.hold(known, structure, self._survey.told):
            return known
        why = "data, indices, owners of parameters, or operations inside of a module differ"
        self._context.history[f"surveyed: {why}"] += 1
        self.structure = None
        return None

    def take(self, run: GraphPass) -> bool:
        """Go by the plan of earlier passes, if there is one and all observers agree to it.

        Args:
            run: The pass, before anything is surveyed.

        Returns:
            Whether it filled in the survey, and cleared the results of earlier passes.
        """
        self._known = known = self._find()
        between, structure, survey = self._between, self.structure, self._survey
        if known is None or structure is None:
            return False
        kept, observers = known.plan.kept, of_plans(run)
        if not all(observer.goes_by(kept.get(type(observer))) for observer in observers):
            return False
        self._context.history["planned before"] += 1
        drivers = [observer.drive(run, known, structure) for observer in observers]
        driver = next((driver for driver in drivers if driver is not None), None)
        between.driver, run.is_driven = driver, driver is not None
        between.driven = None if driver is None else driver.outputs
        survey.sites, survey.batch_size = structure.sites, known.batch_size
        # Views of a visit have what was surveyed.
        is_shown = run.context.observer is not None
        if between.driven is None or is_shown or any(o.needs_survey for o in observers):
            known.fill(survey, structure)
            fill(survey, known.plan.facts, structure, run.context.propagators)
        if between.driven is None:
            between.attend(run)
        calls = [call for call, _ in structure.sites if not call.rule.is_loss]
        run.sink.clear(calls, run.context, structure.parameters)
        return True

    def make(self, run: BackwardPass) -> None:
        """Make a plan from the survey, and compare it with that of earlier passes.

        Raises:
            InternalError: They differ.
        """
        history, known, survey = self._context.history, self._known, self._survey
        if self.structure is None or not survey.uses:
            return
        try:
            travels = any(group.propagator.travels for group in self._context.groups)
            facts = PlannedFacts.of(survey, self.structure, travels)
            plan = Plan.of(survey, self.structure, facts, travels)
        except Unplanned as why:
            history[f"surveyed: {why}"] += 1
            return
        history["planned"] += 1
        if known is not None and known.plan != plan:
            if known.plan.without_data != plan.without_data:
                raise InternalError("A backward pass was planned differently from others like it.")
            self._known = None  # data are rows of the model's input by now, so they are looked at
        self._plan = plan

    def keep(self, run: BackwardPass) -> None:
        """Keep the plan, and what observers leave in it, since the pass went well."""
        if self._plan is None or self.structure is None:
            return
        plan = self._plan if self._known is None else self._known.plan
        plan.kept.update({type(o): o.kept for o in of_plans(run) if o.kept is not None})
        if self._known is None:
            plans.keep(self._asked, self.structure, plan)


def _recognised(context: Context, roots: Sequence[Edge]) -> Structure | None:
    """The structure of the graph; ``None`` if there is no call in it.

    Raises:
        Unplanned: No plan may be made of the pass.
    """
    if not roots:
        raise Unplanned("it is inside of another, or its roots are unknown")
    structure = Structure(roots, context)
    return structure if structure.sites else None
