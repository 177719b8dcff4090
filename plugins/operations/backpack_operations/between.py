"""Any graph: what core asks of a pass in which calls do not just lead to calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node, current_node
from backpack_core.engine.active import Context
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.between import Between
from backpack_core.engine.schedule import Schedule, when_reached
from backpack_core.engine.sink import FieldSink
from backpack_core.plan.structure import OVERWRITTEN, Structure, Unplanned
from backpack_core.record.call import Call, CallCaches, Edge, Site
from backpack_operations import nodes, refusals
from backpack_operations._torch import CopyNode
from backpack_operations.aligning import align
from backpack_operations.bare import add_leaves
from backpack_operations.crossings import Crossings
from backpack_operations.late import refuse_late_uses, refuse_unmet
from backpack_operations.numbers import ByValue, Loose, Numbered
from backpack_operations.own_order import Chunks
from backpack_operations.owners import Owners, entries_of_losses
from backpack_operations.paths import fault_in, nonlinear
from backpack_operations.straight import StraightTraversal
from backpack_operations.survey import GraphSurvey
from backpack_operations.surveying import look_behind
from backpack_operations.terms import refuse_other_terms, refuse_unknown_normaliser
from backpack_operations.told import told
from backpack_operations.unruled import ask_without_rule
from backpack_operations.viewed import look_through
from backpack_operations.visits import GraphTraversal

Grads = Sequence[Tensor | None]


class Numbers(NamedTuple):
    """What a plan knows besides calls.

    Attributes:
        alignment: Where samples lie; ``None`` if every tensor has them on axis 0.
        loose: Parameters that operations use; ``None`` if modules with rules own all of them.
        looked_at: What was made of data whose numbers count; see :class:`GraphSurvey`.
    """

    alignment: Numbered | None
    loose: Loose | None
    looked_at: tuple[tuple[int, ByValue], ...]


class Operations(Between[GraphSurvey]):
    """What lies between the calls of one pass, whatever that is."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.survey = GraphSurvey(
            beside=context.beside, tells_samples=context.tells_samples, told=context.told
        )
        self._crossings = Crossings(self.survey)
        self._walked: list[Edge] = []
        self._is_first = True
        self._attended: tuple[set[Node], set[Node], set[Node]] = set(), set(), set()
        self._viewed: set[Call] = set()
        self._looked_at: dict[Module, None] = {}

    told = staticmethod(told)

    # Before anything is computed ------------------------------------------------------------------

    def look_behind(self, edges: list[Edge]) -> None:
        """Walk past calls, and through operations."""
        self._is_first = not self.survey.sites
        look_behind(self.survey, edges)

    def see_through(self, edges: list[Edge]) -> None:
        """Ask for modules without a rule, for samples, and for parameters that functions use."""
        survey, context = self.survey, self.context
        refusals.refuse_beside(survey, context.extensions)
        ask_without_rule(survey, context)
        fault = fault_in(survey) if context.is_per_sample else None
        if fault is not None:
            raise fault
        self._walked += edges
        can_keep_apart = all(propagator.keeps_apart for propagator in context.propagators)
        align(survey.alignment, survey, self._walked, can_keep_apart)
        self._note_entries()
        refusals.refuse_misaligned(survey, survey.alignment, context.propagators)
        refusals.refuse_other_order(survey, context.extensions)
        add_leaves(survey)
        if survey.sites and survey.bare:
            if context.groups and self._is_first:
                refusals.refuse_loss_alone(survey, context.extensions)
            refusals.refuse_bare(survey, context.extensions)

    def _note_entries(self) -> None:
        """Note whose the rows of losses are, if samples are to be chosen there."""
        if any(p.subsampling is not None for p in self.context.propagators):
            self.survey.entries = entries_of_losses(self.survey)

    def refuse_terms(self, roots: Sequence[Edge], is_inside: bool) -> None:
        """Raise unless it is called on a weighted sum of extended losses."""
        refuse_other_terms(self.survey, roots, self.context.of_losses, is_inside)
        refuse_unknown_normaliser(self.survey, roots, self.context.with_normalisers)

    def nonlinear(self) -> list[Node]:
        """As the table of operations says."""
        return nonlinear(self.survey)

    # Plans ----------------------------------------------------------------------------------------

    def facts_of(self, node: Node) -> Sequence[Any]:
        """What the operation saved besides tensors."""
        if type(node) is CopyNode or nodes.is_nested(node):
            is_copy = type(node) is CopyNode
            raise Unplanned(OVERWRITTEN if is_copy else "there are nested tensors")
        return nodes.settings_of(node)

    def numbered(self, structure: Structure) -> Numbers | None:
        """Where samples lie, and what operations use."""
        survey = self.survey
        if why := survey.why_unusual:
            raise Unplanned(why)
        is_plain = survey.alignment.is_plain and not survey.are_moved
        alignment = None if is_plain else Numbered.of(survey, structure)
        loose, number = Loose.of(survey, structure), structure.between
        if not survey.looked_at.keys() <= number.keys():
            raise Unplanned("data meet parameters inside of a module")
        looked_at = [(number[node], ByValue(found)) for node, found in survey.looked_at.items()]
        is_all = alignment is None and loose is None and not looked_at
        return None if is_all else Numbers(alignment, loose, tuple(looked_at))

    def holds(self, numbers: Numbers | None, batch_size: int, structure: Structure) -> bool:
        """Whether the data whose numbers count lead to the same."""
        if numbers is None or not numbers.looked_at:
            return True
        survey = GraphSurvey(batch_size=batch_size, sites=structure.sites)
        survey.received = dict.fromkeys(structure.sites, batch_size)
        owners, between = Owners(survey), [*structure.between]
        return all(ByValue(owners.of_entry(between[n])) == kept for n, kept in numbers.looked_at)

    def fill(self, numbers: Numbers | None, structure: Structure) -> None:
        """Replace numbers by nodes."""
        survey = self.survey
        survey.seen = dict.fromkeys([(node, ()) for node in structure.between])
        survey.alignment.batch_size = survey.batch_size
        if numbers is None:
            reads_inside = any(call.rule.reads_inside for call, _ in survey.sites)
            survey.is_straight = not (survey.opened or reads_inside)
            return
        if numbers.alignment is not None:
            numbers.alignment.fill(survey, structure)
        if numbers.loose is not None:
            numbers.loose.fill(survey, structure)
        add_leaves(survey)
        self._note_entries()

    # Visits ---------------------------------------------------------------------------------------

    def traversal(self, schedule: Schedule, sink: FieldSink, kept: CallCaches) -> StraightTraversal:
        """What does not fit into memory goes through in chunks."""
        kind = StraightTraversal if self.survey.is_straight else GraphTraversal
        schedule.chunks = Chunks(self, schedule.groups, kept, sink.partial, kind)
        return kind(schedule, sink)

    @property
    def has_operations(self) -> bool:
        """Whether nodes lie between calls."""
        return bool(self.survey.seen)

    @property
    def needs_autograd(self) -> bool:
        """Where samples are kept apart, and in Python functions.

        Only autograd knows which gradients these leave undefined.
        """
        survey = self.survey
        if survey.alignment.starts or survey.leaves or survey.bare:
            return True
        return any(nodes.is_function(n) and not nodes.hands_on(n) for n, _ in survey.seen)

    @property
    def may_begin_passes(self) -> bool:
        """Whether a function may begin a pass that has modules, as a re-entrant checkpoint does."""
        return any(nodes.is_function(node) for node, _ in self.survey.seen)

    def attend(self, run: BackwardPass) -> None:
        """Be called at parameters, where samples are kept apart, and behind views."""
        survey, schedule = self.survey, run.schedule
        if not self._is_first:
            refuse_late_uses(survey, run.sink.stored)
        starts, leaves, viewed = self._attended
        for node in survey.alignment.starts.keys() - starts:
            schedule.await_node(node)
        for node in {node for node, _ in survey.leaves} - leaves:
            when_reached(node, run, _reach_leaf, schedule)
        for node in {node for node, _ in survey.viewed} - viewed:
            when_reached(node, run, _reach_viewed, schedule)
        starts.update(survey.alignment.starts)
        leaves.update(node for node, _ in survey.leaves)
        viewed.update(node for node, _ in survey.viewed)

    def is_watched(self, site: Site) -> bool:
        """Where parameters, or views, are visited; what belongs to which sample is looked at."""
        survey = self.survey
        if survey.leaves or survey.viewed or survey.alignment.apart:
            return True
        return not (survey.is_straight or survey.alignment.positions_of(site))

    def reach(
        self,
        run: BackwardPass,
        site: Site,
        grads: Grads,
        changed_by: Sequence[Any] | None,
    ) -> None:
        """Visit the call, or those that returned views of the tensor; go through its node."""
        survey, (node, output_nr, _), place = self.survey, site.edge, site[:2]
        if place not in survey.sites and run.is_announced and self.context.propagators:
            refuse_unmet(site.call, self.context.extensions[0])
        if survey.leaves:  # nobody can ask when autograd is through
            run.sink.look_ahead()
        if not (survey.moved and place in survey.moved and place in survey.sites):
            if survey.viewed and (node, output_nr) in survey.viewed:
                self.visit_views(run, node, {output_nr: grads[output_nr]})
            run.visit(site, grads[output_nr], changed_by)
        if run.schedule.at_nodes or survey.alignment.starts:  # its hooks are running already
            self._crossings.cross(run.schedule, node, grads)

    def visit_views(self, run: BackwardPass, node: Node, grads: dict[int, Tensor | None]) -> None:
        """Visit calls that returned views of a node's outputs, overwritten in place afterwards."""
        for site, layout in self.survey.views_of(node):
            if site.edge.output_nr in grads and site.call not in self._viewed:
                self._viewed.add(site.call)
                grad = grads[site.edge.output_nr]
                seen = None if grad is None else look_through(layout, grad.unsqueeze(0)).squeeze(0)
                if self.survey.leaves:
                    run.sink.look_ahead()
                run.visit(site, seen, None)

    def visit_leaf(
        self, run: BackwardPass, node: Node, number: int, gradient: Tensor | None
    ) -> None:
        """Visit a parameter that operations use: all that was sent to it is there."""
        site = self.survey.leaves.get((node, number))
        if site is None:
            return
        (own,) = self.survey.trained[site.call]
        sent = run.schedule.waiting_at(site)
        if sent or run.sink.waits_for(own.parameter):
            view = run.view(site, gradient)
            for lane in sent:
                run.traversal.visit(lane, site, view)
            run.sink.end(view, own.parameter)  # nothing else is sent to it
            run.visiting = None
            self._looked_at[site.call.module] = None

    def end(self, run: BackwardPass) -> None:
        """Visit parameters that autograd does not get to, as it only brings their gradients."""
        for place in self.survey.leaves:
            self.visit_leaf(run, *place, None)
        if self.context.extension_hook is not None:
            for module in self._looked_at:
                self.context.extension_hook(module)

    def leave(self, schedule: Schedule, lane: int, edge: Edge, wide: Any, own: Any) -> None:
        """Have it wait at the node."""
        self._crossings.leave(schedule, lane, edge, wide, own)

    def cross(self, schedule: Schedule, node: Node, grads: Grads = ()) -> None:
        """By the formula of the node."""
        self._crossings.cross(schedule, node, grads)


def _reach_leaf(run: BackwardPass, grads: Grads) -> None:
    between = run.between
    assert isinstance(between, Operations)
    for number, gradient in enumerate(grads):
        between.visit_leaf(run, current_node(), number, gradient)


def _reach_viewed(run: BackwardPass, grads: Grads) -> None:
    between = run.between
    assert isinstance(between, Operations)
    between.visit_views(run, current_node(), dict(enumerate(grads)))
    run.schedule.reach(grads)
