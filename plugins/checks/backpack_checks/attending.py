"""The observer that decides whether a backward pass is measured, and begins the measurement."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from backpack_checks.dyed import Question
from backpack_checks.sums import SumCheck
from backpack_checks.trust import Measurement, Trust, trust_in
from backpack_core.engine.active import Group
from backpack_core.engine.backward import BackwardPass
from backpack_operations.observer import PlanObserver
from backpack_operations.plan import Asked


class Checks(PlanObserver):
    """Measures passes until their structure is known to be right: by the dye, and by sums.

    Attributes:
        kept: What earlier passes of this structure showed.
    """

    answers = frozenset({"check"})
    needs_visits = False  # a pass that uses a plan was measured before
    kept: Trust | None = None

    def __init__(self, run: BackwardPass) -> None:
        self._context, self._is_always = run.context, run.context.check == "always"
        self._measurement: Measurement | None = None
        self._sums: SumCheck | None = None
        self._forget: list[Callable[[], None]] = []

    @cached_property
    def _question(self) -> Question:
        context = self._context
        of_losses = bool(context.of_losses)
        return Question(context.is_per_sample, context.is_curvature, of_losses)

    def goes_by(self, kept: Trust | None) -> bool:
        """Whether earlier passes showed enough, so that a plan may be used."""
        self.kept = kept
        if kept is not None and not self._is_always and kept.is_enough(0):
            return True
        return not any(self._question)

    def begin(self, run: BackwardPass) -> None:
        """Add the dye to the quantities of the pass, if a measurement is due."""
        if run.survey.is_planned:
            if self.kept is not None:
                self.kept.passes += 1
            return
        self.kept = trust = trust_in(run.survey, self._question) if run.is_whole else None
        if trust is None:
            run.survey.is_measured = not any(self._question)
            return
        is_due = self._is_always or not trust.is_enough()
        run.survey.is_measured = is_due or _asked(run) not in trust.asked
        if not is_due:
            return
        run.context.seen.add("measured")
        self.needs_autograd = True
        what = run.survey, run.roots, trust, self._question, self._is_always
        self._measurement = measurement = Measurement(*what)
        keeping = [group.propagator.keeps_apart for group in run.groups]
        if keeping and all(keeping) and not run.context.beside:
            self._sums = SumCheck(run.survey, run.groups, trust)
        dye, lane = measurement.dye, len(run.groups)
        run.groups.append(Group(dye))
        for edge, gradient in zip(run.roots, run.gradients, strict=False):
            if gradient is not None:
                run.schedule.leave(lane, edge, wide=dye.begin(gradient, edge))
        if run.arguments.options.get("inputs"):  # a root may depend on none of them
            schedule: Any = run.schedule
            self._forget = [partial(schedule.forget, lane, edge) for edge in run.roots]

    def leave(self) -> None:
        """Remove the hooks."""
        if self._sums is not None:
            self._sums.leave()
        for forget in self._forget:
            forget()

    def finish(self, run: Any) -> None:
        """Note the outputs at which later passes have nothing more to measure."""
        if self._measurement is not None:
            self._measurement.settle()

    def stored(self, run: BackwardPass) -> None:
        """Note what was asked for: nothing was refused by values."""
        if self.kept is not None and not run.survey.is_planned:
            self.kept.asked.add(_asked(run))


def _asked(run: BackwardPass) -> Asked:
    between: Any = run.between  # nothing is kept of core's own passes, which do not know it
    asked: Asked = between.asked
    return asked
