"""This library's answer to core: a :class:`Between` for graphs with any operations between calls.

Core asks one :class:`Operations` in each pass, in the order of the sections below.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node, current_node
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.active import Context
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.between import Between
from backpack_core.errors import BackpackWarning, warn_once
from backpack_core.record.call import Call, CallCaches, Edge, Site
from backpack_operations import nodes, refusals
from backpack_operations.aligning import align
from backpack_operations.arguments import axes_of, said
from backpack_operations.bare import add_leaves
from backpack_operations.crossings import Crossings
from backpack_operations.inside import read_inside
from backpack_operations.late import refuse_late_uses, refuse_unmet
from backpack_operations.observer import Driver
from backpack_operations.own_order import Chunks
from backpack_operations.owners import note_owners
from backpack_operations.passes import GraphPass, pass_inside
from backpack_operations.paths import fault_in, nonlinear
from backpack_operations.plan import Asked, plans
from backpack_operations.received import run_of
from backpack_operations.recording import record
from backpack_operations.schedule import HookSchedule, NodeSchedule, when_reached
from backpack_operations.sink import GraphSink
from backpack_operations.straight import StraightTraversal
from backpack_operations.survey import GraphSurvey
from backpack_operations.surveying import look_behind
from backpack_operations.terms import refuse_other_terms, refuse_unknown_normaliser
from backpack_operations.traits import traits_of
from backpack_operations.unruled import ask_without_rule
from backpack_operations.viewed import look_through, record_at_base
from backpack_operations.visits import GraphTraversal
from backpack_products.column_propagator import ColumnPropagator
from backpack_products.substitutes import forget_parameters, is_parameter

Grads = Sequence[Tensor | None]


class Operations(Between):
    """What lies between the calls of one pass: any operations.

    Attributes:
        asked: What is asked for.
        driver: Replaces the visits, if an observer has brought one.
        driven: The outputs that the driver visits; ``None`` if the engine visits calls, too.
    """

    survey: GraphSurvey
    driver: Driver | None = None
    driven: Collection[tuple[Call, int]] | None = None

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.asked = Asked.of(context)
        tells = self.asked.tells_samples
        self.survey = GraphSurvey(beside=context.beside, tells_samples=tells, told=context.told)
        self._crossings = Crossings(self.survey)
        self._edges: list[Edge] = []
        self._is_first = True
        self._with_hooks: tuple[set[Node], set[Node], set[Node]] = set(), set(), set()
        self._visited_views: set[Call] = set()
        self._visited_modules: dict[Module, None] = {}

    said, axes_of = staticmethod(said), staticmethod(axes_of)
    run_of, traits_of = staticmethod(run_of), staticmethod(traits_of)
    is_parameter = staticmethod(is_parameter)
    note_view = staticmethod(record_at_base)
    pass_inside = staticmethod(pass_inside)
    read_inside = staticmethod(read_inside)
    record = staticmethod(record)
    schedule, sink, passes = HookSchedule, GraphSink, GraphPass

    # Before anything is computed ------------------------------------------------------------------

    def look_behind(self, edges: list[Edge]) -> None:
        """Walk past calls with rules, and through operations."""
        self._is_first = not self.survey.sites
        self.survey.shows_all = all(map(_takes_all, self.context.propagators))
        look_behind(self.survey, edges)

    def see_through(self, edges: list[Edge]) -> None:
        """Settle modules without a rule, where samples lie, and parameters that functions use."""
        survey, context = self.survey, self.context
        refusals.refuse_beside(survey, context.extensions)
        ask_without_rule(survey, context)
        fault = fault_in(survey) if context.is_per_sample else None
        if fault is not None:
            raise fault
        self._edges += edges
        can_keep_apart = all(propagator.keeps_apart for propagator in context.propagators)
        align(survey.alignment, survey, self._edges, can_keep_apart)
        note_owners(survey, context.propagators)
        refusals.refuse_misaligned(survey, survey.alignment, context.propagators)
        refusals.refuse_other_order(survey, context.extensions)
        add_leaves(survey)
        if survey.sites and survey.bare:
            if context.groups and self._is_first:
                refusals.refuse_loss_alone(survey, context.extensions)
            refusals.refuse_bare(survey, context.extensions)

    def refuse_terms(self, roots: Sequence[Edge], is_inside: bool) -> None:
        """Raise an error unless ``backward()`` is called on a weighted sum of extended losses."""
        refuse_other_terms(self.survey, roots, self.context.of_losses, is_inside)
        refuse_unknown_normaliser(self.survey, roots, self.context.with_normalisers)

    def nonlinear(self) -> list[Node]:
        """The operations that the table does not list as linear."""
        return nonlinear(self.survey)

    # What earlier passes found --------------------------------------------------------------------

    latest_plan = staticmethod(plans.latest)

    @staticmethod
    def forget(model: Module) -> None:
        """Forget the plans of a model, and which parameters it had."""
        plans.forget(model)
        forget_parameters(model)

    # Visits ---------------------------------------------------------------------------------------

    def traversal(self, schedule: Any, sink: Any, kept: CallCaches) -> StraightTraversal | None:
        """The visits, which send columns in chunks if they do not fit into memory."""
        if self.driven is not None:
            return None
        is_straight = self.survey.is_straight and not any(g.has_overrides for g in schedule.groups)
        kind = StraightTraversal if is_straight else GraphTraversal
        schedule.chunks = Chunks(self, schedule.groups, kept, sink.partial, kind)
        return kind(schedule, sink)

    def warn_unmeasured(self) -> None:
        """Warn once that operations lie between modules, and no library measures their effect."""
        if self.survey.between:
            warn_once(
                "unmeasured",
                "backpack(check='first') cannot measure whether samples stay apart at operations "
                "between modules, as backpack-checks is missing: pip install backpack-checks, or "
                "write check='never'.",
                BackpackWarning,
            )

    @property
    def needs_autograd(self) -> bool:
        """Whether autograd must run, for example if columns are kept apart or for Python functions.

        Only autograd knows which gradients these leave undefined.
        """
        survey = self.survey
        if survey.alignment.starts or survey.leaves or survey.bare:
            return True
        return any(nodes.is_function(n) and not nodes.hands_on(n) for n, _ in survey.between)

    @property
    def may_begin_passes(self) -> bool:
        """Whether a Python function may run a backward pass (a re-entrant checkpoint does)."""
        return any(nodes.is_function(node) for node, _ in self.survey.between)

    def attend(self, run: BackwardPass) -> None:
        """Have autograd call back at parameters, where columns become apart, at bases of views."""
        survey, schedule = self.survey, run.schedule
        assert isinstance(schedule, HookSchedule)
        if not self._is_first:
            refuse_late_uses(survey, run.sink.stored)
        starts, leaves, viewed = self._with_hooks
        survey.alignment.note_later(run.is_announced)
        supply = any(type(p).supply is not Propagator.supply for p in self.context.propagators)
        begin = survey.alignment.starts | survey.alignment.later if supply else {}
        for node in begin.keys() - starts:
            schedule.await_node(node)
        for node in {node for node, _ in survey.leaves} - leaves:
            when_reached(node, run, _reach_leaf, schedule)
        for node in {node for node, _ in survey.viewed} - viewed:
            when_reached(node, run, _reach_viewed, schedule)
        starts.update(begin)
        leaves.update(node for node, _ in survey.leaves)
        viewed.update(node for node, _ in survey.viewed)

    def is_visited(self, site: Site) -> bool:
        """Whether a call needs a visit if extensions only read."""
        if self.driven is not None:
            return site[:2] in self.driven
        survey = self.survey
        if survey.trained[site.call] or survey.leaves or survey.viewed or survey.alignment.apart:
            return True
        return not (survey.is_straight or survey.alignment.positions_of(site))

    def reach(
        self,
        run: BackwardPass,
        site: Site,
        grads: Grads,
        changed_by: Sequence[Any] | None,
    ) -> None:
        """Visit the call, or let the driver do so."""
        if self.driver is None or site[:2] not in self.survey.sites:
            self.visit(run, site, grads, changed_by)
        else:
            assert isinstance(run, GraphPass)
            grad = grads[site.edge.output_nr]
            if self.context.observer is not None:
                run.precede(site, grad)
            self.driver.reach(run, site, grads, changed_by)
            run.conclude(site, grad)

    def visit(
        self,
        run: BackwardPass,
        site: Site,
        grads: Grads,
        changed_by: Sequence[Any] | None,
    ) -> None:
        """Visit the call, or those that returned views of its output; then cross its node."""
        survey, (node, output_nr, _), key = self.survey, site.edge, site[:2]
        if key not in survey.sites and run.is_announced and self.context.propagators:
            refuse_unmet(site.call, self.context.extensions[0])
        if survey.leaves:  # which uses autograd does not reach is only known during its pass
            run.sink.look_ahead()
        if not (survey.at_base and key in survey.at_base and key in survey.sites):
            if survey.viewed and (node, output_nr) in survey.viewed:
                self.visit_views(run, node, {output_nr: grads[output_nr]})
            run.visit(site, grads[output_nr], changed_by)
        schedule: Any = run.schedule
        if schedule.at_nodes or survey.alignment.starts:  # a hook set now would be too late
            schedule.cross(schedule, node, grads)

    def visit_views(self, run: BackwardPass, node: Node, grads: dict[int, Tensor | None]) -> None:
        """Visit calls that returned views of a node's outputs which were overwritten in place."""
        for site, layout in self.survey.views_of(node):
            if site.edge.output_nr in grads and site.call not in self._visited_views:
                self._visited_views.add(site.call)
                grad = grads[site.edge.output_nr]
                if grad is not None:
                    grad = look_through(layout, grad.unsqueeze(0)).squeeze(0)
                if self.survey.leaves:
                    run.sink.look_ahead()
                run.visit(site, grad, None)

    def visit_leaf(
        self, run: BackwardPass, node: Node, output_nr: int, gradient: Tensor | None
    ) -> None:
        """Visit a parameter that operations use; everything that was sent to it has arrived."""
        site = self.survey.leaves.get((node, output_nr))
        if site is None:
            return
        (own,) = self.survey.trained[site.call]
        sent = cast("NodeSchedule", run.schedule).waiting_at(site)
        if sent or run.sink.waits_for(own.parameter):
            assert isinstance(run, GraphPass)
            view = run.view(site, gradient)
            for lane in sent:
                run.traversal.visit(lane, site, view)
            run.sink.end(view, own.parameter)  # nothing else is sent to it
            run.visiting = None
            self._visited_modules[site.call.module] = None

    def end(self, run: BackwardPass) -> None:
        """Visit the parameters whose nodes autograd did not run, as with ``inputs=...``."""
        for leaf in self.survey.leaves:
            self.visit_leaf(run, *leaf, None)
        if self.context.extension_hook is not None:
            for module in self._visited_modules:
                self.context.extension_hook(module)
        if self.driver is not None:
            self.driver.end(run)

    def leave(self, schedule: Any, lane: int, edge: Edge, wide: Any, own: Any) -> None:
        """Have a quantity wait at the node that it was sent to."""
        self._crossings.leave(schedule, lane, edge, wide, own)

    def cross(self, schedule: NodeSchedule, node: Node, grads: Grads = ()) -> None:
        """Carry what waits at a node through it, and send it on.

        Args:
            schedule: Where it waits.
            node: The node.
            grads: The gradients at its outputs, if autograd is at the node.
        """
        self._crossings.cross(schedule, node, grads)


def _takes_all(propagator: Propagator) -> bool:
    """Whether a propagator only sends columns of all samples."""
    return isinstance(propagator, ColumnPropagator) and propagator.subsampling is None


def _reach_leaf(run: BackwardPass, grads: Grads) -> None:
    between = run.between
    assert isinstance(between, Operations)
    for output_nr, gradient in enumerate(grads):
        between.visit_leaf(run, current_node(), output_nr, gradient)


def _reach_viewed(run: BackwardPass, grads: Grads) -> None:
    between = run.between
    assert isinstance(between, Operations)
    between.visit_views(run, current_node(), dict(enumerate(grads)))
    cast("HookSchedule", run.schedule).reach(grads)
