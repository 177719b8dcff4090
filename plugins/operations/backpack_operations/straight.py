"""Visits in straight graphs: every call has a rule, and its samples on axis 0.

Operations may lie between calls, and columns that do not fit into memory go through the net in
chunks. A plan says that a graph is straight; ``visits.py`` adds what other graphs need.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from backpack_core.contract.propagator import Propagator
from backpack_core.engine.location import place
from backpack_core.engine.schedule import NOTHING, Waiting
from backpack_core.engine.traversal import Traversal, Visit
from backpack_core.errors import OverwrittenInputError
from backpack_core.record.call import Edge, Site
from backpack_core.record.view import View
from backpack_operations.chosen import of_samples
from backpack_operations.schedule import NodeSchedule
from backpack_operations.survey import GraphSurvey
from backpack_operations.viewed import below

if TYPE_CHECKING:
    from backpack_operations.own_order import Chunks  # which imports this file


class StraightTraversal(Traversal):
    """Visits calls that have a rule, and samples on axis 0."""

    survey: GraphSurvey
    schedule: NodeSchedule

    def visit(self, lane: int, site: Site, view: View) -> None:
        """Visit the samples that take part, each with all of its entries; see the base class."""
        group = self.groups[lane]
        if view.positions and (chosen := group.propagator.subsampling) is not None:
            try:
                view = of_samples(view, chosen)
            except Exception as error:
                place(error, view, group.first)
                raise
        super().visit(lane, site, view)

    def arrive(self, visit: Visit) -> Any:
        """The quantity that arrived at a call, also from operations."""
        view, waiting = visit.view, visit.arrived.own
        if visit.arrived.wide is not None or view.axis:
            propagator = self.groups[visit.lane].propagator
            waiting = self._at_output(propagator, visit.site, view, visit.arrived)
        return visit.carrier.arrive(view, waiting)

    def _at_output(self, propagator: Propagator, site: Site, view: View, arrived: Waiting) -> Any:
        """Combine what arrived from operations and from calls into one quantity."""
        wide, own = propagator.narrow(arrived.wide), arrived.own
        return wide if own is None else propagator.merge(own, wide)

    def send(self, visit: Visit, quantity: Any, whole: Any) -> None:
        """Send what does not fit into memory through the net in chunks, and then the rest."""
        site = visit.site
        if site.layout is None and not visit.view.axis:  # else the shape inside is another one
            if self.groups[visit.lane].propagator.sheds_everywhere or site.call.rule.is_loss:
                whole = self._shed(visit, whole)
            if whole is not quantity:
                visit = visit._replace(arrived=NOTHING)
        self.send_rest(visit, whole)

    def send_rest(self, visit: Visit, quantity: Any) -> None:
        """Send a quantity on to the inputs of the call."""
        try:
            super().send(visit, quantity, quantity)
        except OverwrittenInputError:
            # The rule lacks its input, but autograd saved a copy at the node of the output.
            self._send_below(visit, quantity)

    def _send_below(self, visit: Visit, quantity: Any) -> None:
        """Send a quantity through the node that made the output, instead of the rule."""
        lane, site, *_, arrived = visit
        restarts = self.groups[lane].propagator.starts_everywhere and site.layout is None
        if arrived == NOTHING or restarts:  # not at a view, whose shape is another one
            self.hand_on(visit, below(site), quantity)
        else:
            self.schedule.deliver(lane, below(site), *arrived)

    def carried(self, visit: Visit, quantity: Any) -> Any:
        """What the carrier sends, for which the time is taken; see the base class."""
        watch, module = self.groups[visit.lane].watch, visit.site.call.module
        if watch is None:
            return super().carried(visit, quantity)
        kind = type(visit.carrier.speaker)
        return watch(module, kind, "sent", super().carried, visit, quantity)

    def residuals(self, visit: Visit) -> dict[int, Any]:
        """The residuals of a call; those that do not fit into memory are sent in chunks.

        Chunks themselves send no residuals: these are sent once, with the first columns.
        """
        chunks: Chunks | None = self.schedule.chunks
        if chunks is None:
            return {}
        residuals = super().residuals(visit)
        lane, site, view, *_ = visit
        propagator = self.groups[lane].propagator
        size = chunks.size(lane, view.device.type) if residuals else None
        if size is None:
            return residuals
        for position, new in residuals.items():
            edge = site.call.edges[position]
            assert edge is not None
            residuals[position], parts = propagator.shed(
                None, view, new, size, self._is_rooted(edge)
            )
            for part in parts:
                hand_on = partial(_hand_on, visit=visit, edge=edge, quantity=part)
                chunks.carry(lane, site.edge.node, hand_on)
        return residuals

    def _shed(self, visit: Visit, quantity: Any) -> Any:
        """Send columns that do not fit into memory through the net in chunks; returns the rest."""
        chunks: Chunks | None = self.schedule.chunks
        lane, site, view, *_ = visit
        size = None if chunks is None else chunks.size(lane, view.device.type)
        if chunks is None or size is None:
            return quantity
        call, propagator = site.call, self.groups[lane].propagator
        goes_inside = call in self.survey.opened and not call.rule.is_loss
        edges = (below(site),) if goes_inside else call.edges
        is_rooted = any(edge is not None and self._is_rooted(edge) for edge in edges)
        kept, parts = propagator.shed(call.rule, view, quantity, size, is_rooted)
        apart = visit._replace(arrived=NOTHING)
        for part in parts:
            send = partial(_send_part, visit=apart, quantity=part)
            chunks.carry(lane, site.edge.node, send)
        return kept

    def _is_rooted(self, edge: Edge) -> bool:
        """Whether a quantity at an edge must be in the form of ``Propagator.rooted``."""
        return self.survey.is_shared or self.survey.site_at(edge) is None


def _hand_on(by: StraightTraversal, visit: Visit, edge: Edge, quantity: Any) -> None:
    by.hand_on(visit, edge, quantity)


def _send_part(by: StraightTraversal, visit: Visit, quantity: Any) -> None:
    by.send_rest(visit, quantity)
