"""Decides which passes are measured: those whose structure is not known to be right.

Measuring every pass would cost too much, and a training loop repeats the same structure.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from backpack_checks.dye import DyePropagator
from backpack_checks.dyed import Judge, Question, Weights
from backpack_core._torch import Node
from backpack_core.graph import Survey, is_leaf
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Edge
from backpack_core.record.models import owner_of
from backpack_operations import nodes
from backpack_operations.bridge import written_at
from backpack_operations.paths import reached_past_losses
from backpack_operations.plan import plans
from backpack_operations.received import ModelRun
from backpack_operations.structure import inside_of
from backpack_operations.survey import GraphSurvey
from backpack_products.values import is_symbolic

MOST: Final = 100  # structures that are remembered for one model: the latest ones


@dataclass
class Trust:
    """What earlier passes of one structure showed.

    Attributes:
        passes: The number of passes.
        open_sites: Outputs of calls at which nothing could be compared yet, by number in the walk;
            and -1 while an operation gave zeros only. ``None`` before the first pass.
        summed: Parameters whose gradient equals the sum of their products, by keys of their uses.
        asked: What was asked for in passes of this structure that looked at values and went well.
    """

    passes: int = 0
    open_sites: set[int] | None = None
    summed: set[Hashable] = field(default_factory=set)
    asked: set[Hashable] = field(default_factory=set)

    def is_due(self, after: int = 1) -> bool:
        """Whether a pass is measured anyway: the passes 1, 2, 4, 8, … are.

        Args:
            after: 1 for the current pass, which ``passes`` counts already; 0 for the next one.
        """
        number = self.passes + 1 - after
        return number & (number - 1) == 0

    def is_enough(self, after: int = 1) -> bool:
        """Whether a pass need not be measured: nothing more can be shown, and it is not due."""
        return self.open_sites is not None and not self.open_sites and not self.is_due(after)


class Measurement:
    """The measurement of one pass.

    Attributes:
        dye: The propagator of the dye.
    """

    def __init__(
        self,
        survey: Survey,
        roots: Sequence[Edge],
        trust: Trust,
        question: Question,
        is_always: bool = False,
    ) -> None:
        assert isinstance(survey, GraphSurvey)  # see :func:`trust_in`
        # Extended losses tell where samples are, so that one guess suffices; functions do not.
        guesses = 1 if question.is_of_losses or reached_past_losses(survey, roots) is None else 2
        weights = Weights(survey.batch_size, trust.passes, guesses)
        judge = Judge(weights, question, survey.is_told, survey.is_unread)
        self.dye = DyePropagator(judge, survey, not (is_always or trust.open_sites is None))
        self._survey = survey
        self._trust, self._before = trust, trust.open_sites
        trust.open_sites = None  # stays so if the pass fails

    def settle(self) -> None:
        """Note the outputs at which later passes have nothing more to measure."""
        unsettled = {
            number
            for number, (key, site) in enumerate(self._survey.sites.items())
            if key not in self.dye.settled and not (key[0].rule.is_loss or is_leaf(site.edge.node))
        }
        unsettled |= {-1} if self.dye.is_cut else set()
        self._trust.open_sites = unsettled if self._before is None else unsettled & self._before


def trust_in(survey: Survey, question: Question) -> Trust | None:
    """What earlier passes of the same structure showed; ``None`` if nothing can be measured.

    Args:
        survey: The graph.
        question: What the pass must show.
    """
    if not survey.sites or not any(question):
        return None
    if not isinstance(survey, GraphSurvey):
        return None  # core's own survey, of a chain without operations
    outputs = (call.stored.outputs[index] for call, index in survey.sites)
    return None if any(map(is_symbolic, outputs)) else known_of(survey, question)


def known_of(survey: Survey, asked: Hashable) -> Trust:
    """What earlier passes of the same structure showed; counts this pass.

    A structure consists of the calls, the nodes between them with their axes (and those inside of
    calls that run code of users), what leads to what, train or eval mode, the axes that are as long
    as the batch, which calls received the model's input, which return tables, whether indices of
    all rows have them in order, where views were overwritten, and the classes of modules, of their
    tensors and of modes around the model, since these may replace functions.
    Sizes do not count, so that padding to another length keeps the structure.

    Nothing is known where rows are picked inside of a checkpoint: whose they are is not read, and
    may be another in each pass.

    Args:
        survey: The graph.
        asked: What else distinguishes passes.
    """
    if isinstance(survey, GraphSurvey) and survey.is_unread:
        return Trust(passes=1)
    *_, (call, _) = survey.sites  # the first may be a loss that is new in each pass
    notes = plans.notes.setdefault(owner_of(call.module), {})
    table: OrderedDict[Hashable, Trust] = notes.setdefault(Trust, OrderedDict())
    if survey.structure is None:
        survey.structure = _structure(survey)
    key = registry.generation, asked, survey.structure  # another rule may be wrong
    trust = table.setdefault(key, Trust())
    table.move_to_end(key)
    if len(table) > MOST:
        table.popitem(last=False)  # if it comes back later, it is measured again
    trust.passes += 1
    return trust


def _structure(survey: Survey) -> tuple[object, ...]:
    """The structure of a graph, as a key."""
    calls, is_batch = [], survey.batch_size.__eq__
    between, tables = list[Node](), set[Node]()
    if isinstance(survey, GraphSurvey):
        between, tables = [node for node, _ in survey.between], survey.tables
    places: dict[object, int] = {node: number for number, node in enumerate(between)}
    places |= {site.edge[:2]: ~number for number, site in enumerate(survey.sites.values())}

    def operands(edges: Iterable[Any]) -> list[object]:
        """Which calls and nodes made the operands, each with the number of its output."""
        pairs = [edge[:2] if edge else (None, 0) for edge in edges]
        return [(places.get(pair, places.get(pair[0])), pair[1]) for pair in pairs]

    for (call, index), site in survey.sites.items():
        stored, received = call.stored, () if all(call.edges) else (call.receives_input,)
        axes = [tuple(map(is_batch, t.shape)) for t in (*stored.inputs, stored.outputs[index])]
        kinds = type(call.module), *map(type, stored.tensors.values())
        modes = call.run.modes if isinstance(call.run, ModelRun) else ()
        data = *received, site.edge.node in tables
        own = call.path, index, call.training, kinds, modes, data
        inside = inside_of(call, site.edge.node) if call.rule.calls_others else ()
        asked = [tuple(map(is_batch, f)) if type(f) is torch.Size else f for f in inside]
        calls.append((*own, *axes, *operands(call.edges), *asked))
    if not isinstance(survey, GraphSurvey):
        return (*calls,)
    operations = list[tuple[object, ...]]()
    for node in between:
        is_indexed = nodes.has_indices(type(node)) and survey.may_read(node)
        indexed = nodes.axes_indexed(node) if is_indexed else ()
        settings = sys.intern(node.name()), *nodes.settings_of(node), *indexed
        lengths = map(is_batch, nodes.lengths_of(node, 0))
        written = written_at(node) if survey.may_read(node) else ()
        operations.append((*settings, *lengths, *written, *operands(node.next_functions)))
    # Data that operations meet may be in order in one pass, but not in others.
    met = [
        None if i is None else (i.shape, *i.flatten().tolist()) for i in survey.looked_at.values()
    ]
    # So may rows be by an index that the user gives.
    return (*calls, *operations, *met, len(survey.alignment.owned))
