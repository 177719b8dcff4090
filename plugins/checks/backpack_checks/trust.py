"""Decides in which passes to measure: those of a structure that is not known to be right.

Measuring in every pass would cost too much, and a structure does not change between passes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from backpack_checks.dye import DyePropagator
from backpack_checks.dyed import Judge, Question, Weights
from backpack_core.graph.nodes import is_leaf
from backpack_core.graph.survey import Survey
from backpack_core.plan.plan import plans
from backpack_core.record.call import Edge
from backpack_core.record.owner import owner_of
from backpack_operations import nodes
from backpack_operations.paths import reached_past_losses
from backpack_operations.survey import GraphSurvey
from backpack_products.values import is_symbolic

MOST: Final = 100  # structures of one model, those that were seen last


@dataclass
class Trust:
    """What earlier passes of one structure have shown.

    Attributes:
        passes: How many passes there were.
        open_sites: Outputs of calls at which nothing could be compared yet, by their number in the
            walk; also -1 while an operation gave only zeros. ``None`` before the first pass.
        summed: Parameters whose gradient was the sum of their products, by the keys of their uses.
    """

    passes: int = 0
    open_sites: set[int] | None = None
    summed: set[Hashable] = field(default_factory=set)

    def is_due(self, after: int = 1) -> bool:
        """Whether this pass is measured, as the passes 1, 2, 4, 8, … are.

        Args:
            after: How many passes are counted that were not before it; zero for the next one.
        """
        before = self.passes - after
        return before & (before - 1) == 0

    def is_enough(self, after: int = 1) -> bool:
        """Whether it need not be measured: there is nothing more to learn, and it is not due."""
        return self.open_sites is not None and not self.open_sites and not self.is_due(after)


class Measurement:
    """The dye of one pass, and what is learnt from it.

    Attributes:
        dye: The propagator of the dye.
    """

    def __init__(
        self, survey: Survey, roots: Sequence[Edge], trust: Trust, question: Question
    ) -> None:
        assert isinstance(survey, GraphSurvey)  # as :func:`trust_in` has seen
        # Extended losses say where samples are. For their curvature, any other term is an error.
        guesses = 1 if question.is_of_losses or reached_past_losses(survey, roots) is None else 2
        weights = Weights(survey.batch_size, trust.passes, guesses)
        self.dye = DyePropagator(Judge(weights, question), survey)
        self._survey = survey
        self._trust, self._before = trust, trust.open_sites
        trust.open_sites = None  # a pass that fails leaves no trust

    def settle(self) -> None:
        """Remember at which outputs there is nothing more to learn."""
        still = {
            number
            for number, (place, site) in enumerate(self._survey.sites.items())
            if place not in self.dye.settled
            and not (place[0].rule.is_loss or is_leaf(site.edge.node))
        }
        still |= {-1} if self.dye.is_cut else set()
        self._trust.open_sites = still if self._before is None else still & self._before


def trust_in(survey: Survey, question: Question) -> Trust | None:
    """What is known of the structure of a pass; ``None`` if there is nothing to measure.

    Args:
        survey: The graph.
        question: What the pass has to show.
    """
    if not survey.sites or not any(question):
        return None
    if not isinstance(survey, GraphSurvey):
        return None  # nobody knows what is between calls
    shown = (call.stored.outputs[index] for call, index in survey.sites)
    return None if any(map(is_symbolic, shown)) else known_of(survey, question)


def known_of(survey: Survey, asked: Hashable) -> Trust:
    """What is known of the structure of a pass, which is counted as one more of it.

    Structures differ by calls, the nodes between them with the axes that these go along, train and
    eval mode, and by which axes are as long as the batch. They do not differ by sizes, so that
    padding to another length is the same structure.

    Args:
        survey: The graph.
        asked: What else distinguishes passes.
    """
    *_, (call, _) = survey.sites  # not the first: a loss may be a new module in each pass
    notes = plans.notes.setdefault(owner_of(call.module), {})
    table: OrderedDict[Hashable, Trust] = notes.setdefault(Trust, OrderedDict())
    if survey.structure is None:
        survey.structure = _structure(survey)
    key = asked, survey.structure
    found = table.setdefault(key, Trust())
    table.move_to_end(key)
    if len(table) > MOST:
        table.popitem(last=False)  # a structure that comes back later is measured again
    found.passes += 1
    return found


def _structure(survey: Survey) -> tuple[object, ...]:
    calls, is_batch = [], survey.batch_size.__eq__
    for call, index in survey.sites:
        stored = call.stored
        axes = [tuple(map(is_batch, t.shape)) for t in (*stored.inputs, stored.outputs[index])]
        calls.append((call.path, index, call.training, *axes))
    seen = survey.between if isinstance(survey, GraphSurvey) else ()
    between = [(sys.intern(node.name()), *nodes.settings_of(node)) for node, _ in seen]
    return (*calls, *between)
