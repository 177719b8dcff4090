"""Checks of one backward pass: whether it has to be measured, and what is measured then."""

from __future__ import annotations

from typing import Any

from backpack_checks.dyed import Question
from backpack_checks.sums import SumCheck
from backpack_checks.trust import Measurement, Trust, trust_in
from backpack_core.contract.observer import Observer
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.groups import Group


class Checks(Observer):
    """Has the dye travel, and sums compared, if a structure is not known to be right.

    Attributes:
        kept: What passes have shown of graphs of this structure.
    """

    answers = frozenset({"check"})
    needs_visits = False  # what a plan is taken for is measured already
    kept: Trust | None = None

    def __init__(self, run: BackwardPass) -> None:
        context = run.context
        of_losses = bool(context.of_losses)
        self._question = Question(context.is_per_sample, context.is_curvature, of_losses)
        self._is_always = context.check == "always"
        self._measurement: Measurement | None = None
        self._sums: SumCheck | None = None

    def goes_by(self, kept: Trust | None) -> bool:
        """Whether earlier passes have shown enough, and this one is not due."""
        self.kept = kept
        if not any(self._question):
            return True
        return kept is not None and not self._is_always and kept.is_enough(0)

    def begin(self, run: BackwardPass) -> None:
        """Have the dye travel, too, if that is due."""
        if run.survey.is_planned:
            if self.kept is not None:
                self.kept.passes += 1
            return
        self.kept = trust = trust_in(run.survey, self._question) if run.is_whole else None
        if trust is None or (trust.is_enough() and not self._is_always):
            return
        run.context.seen.add("measured")
        run.survey.is_measured = self.needs_autograd = True
        self._measurement = measurement = Measurement(run.survey, run.roots, trust, self._question)
        keeping = [group.propagator.keeps_apart for group in run.groups]
        if keeping and all(keeping) and not run.context.beside:
            self._sums = SumCheck(run.survey, run.groups)
        dye, lane = measurement.dye, len(run.groups)
        run.groups.append(Group(dye))
        for edge, gradient in zip(run.roots, run.gradients, strict=False):
            if gradient is not None:
                run.schedule.leave(lane, edge, wide=dye.begin(gradient, edge))

    def leave(self) -> None:
        """Remove hooks."""
        if self._sums is not None:
            self._sums.leave()

    def finish(self, run: Any) -> None:
        """Remember at which outputs there is nothing more to learn."""
        if self._measurement is not None:
            self._measurement.settle()
