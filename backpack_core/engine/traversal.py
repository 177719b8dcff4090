"""What happens at a visit: extensions read at parameters, and quantities go on to the inputs.

The order of visits is the schedule's, and the place of results the sink's, so the same code serves
autograd's order and any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backpack_core.contract.carrier import Carrier
from backpack_core.engine.carriers import RuleCarrier, values_of
from backpack_core.engine.location import place
from backpack_core.engine.losses import nothing_arrived
from backpack_core.engine.schedule import Schedule, Waiting
from backpack_core.engine.sink import Sink
from backpack_core.graph.parameters import Trained
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Site
from backpack_core.record.view import View


class Traversal:
    """What happens when a call is visited; a library may add steps for other graphs than chains.

    Attributes:
        schedule: What waits where, for every group.
        sink: Where values go.
    """

    def __init__(self, schedule: Schedule, sink: Sink) -> None:
        self.survey, self.groups = schedule.survey, schedule.groups
        self.schedule = schedule
        self.sink = sink
        self._carriers: dict[int, RuleCarrier] = {}

    def visit(self, lane: int, site: Site, view: View) -> None:
        """Read off and send on, for one group at one output of one call.

        Args:
            lane: Which group.
            site: The place.
            view: What a rule sees of the call: all samples.
        """
        group = self.groups[lane]
        propagator = group.propagator
        try:
            if view.positions and propagator.subsampling is not None:
                view = view.subsample(propagator.subsampling)
            carrier = self._carriers.get(lane) or self.carrier(lane, view)
            arrived = self.schedule.take(lane, site)
            quantity = self.arrive(lane, site, view, carrier, arrived)
            if quantity is None and not view.is_reached:
                quantity = propagator.nothing(view)
            if quantity is None and not carrier.starts(view):
                raise nothing_arrived(view, type(group.first).__name__)
            is_shared = self.survey.is_shared and quantity is not None
            whole = propagator.rooted(quantity) if is_shared else quantity
            self.look(lane, site, view, carrier, quantity, whole, arrived)
            if propagator.travels:
                self.send(lane, site, view, carrier, quantity, whole, arrived)
        except Exception as error:
            place(error, view, group.first)
            raise

    def arrive(self, lane: int, site: Site, view: View, carrier: Carrier, arrived: Waiting) -> Any:
        """What arrived, as a quantity at the call's output."""
        return carrier.arrive(view, arrived.own)

    def look(
        self,
        lane: int,
        site: Site,
        view: View,
        carrier: Carrier,
        quantity: Any,
        whole: Any,
        arrived: Waiting,
    ) -> None:
        """Let extensions read.

        Args:
            lane: Which group.
            site: The place.
            view: What a rule sees of the call.
            carrier: Who answers for the module.
            quantity: The quantity at the output.
            whole: The same, in the form in which uses of a parameter are added.
            arrived: What was sent there.
        """
        if self.groups[lane].extensions:
            self.read(lane, view, carrier, whole, self.survey.trained[site.call])

    def send(
        self,
        lane: int,
        site: Site,
        view: View,
        carrier: Carrier,
        quantity: Any,
        whole: Any,
        arrived: Waiting,
    ) -> None:
        """Send the quantity on to the inputs of the call; see :meth:`look` for the arguments."""
        edges = site.call.edges
        if not any(edges):
            return  # nothing before this call wants the quantity
        for position, arriving in self.sent(lane, site, view, carrier, whole).items():
            edge = edges[position]
            if edge is not None:
                self.schedule.deliver(lane, edge, own=arriving)

    def sent(
        self, lane: int, site: Site, view: View, carrier: Carrier, quantity: Any
    ) -> dict[int, Any]:
        """What goes to the inputs of the call, by position."""
        call, watch = site.call, self.groups[lane].watch
        inputs: dict[int, Any]
        if watch is None:
            inputs = carrier.send(view, quantity)
        else:
            kind = type(carrier.speaker)
            inputs = watch(call.module, kind, "sent", carrier.send, view, quantity)
        if not carrier.gives_values and not call.rule.is_loss:
            for position, new in self.residuals(lane, site, view).items():
                old = inputs.get(position)
                merge = self.groups[lane].propagator.merge
                inputs[position] = new if old is None else merge(old, new)
        return inputs

    def residuals(self, lane: int, site: Site, view: View) -> dict[int, Any]:
        """What comes into being at a call, by position."""
        found = self.groups[lane].propagator.residual(site.call.rule, view)
        edges = site.call.edges
        return {place: new for place, new in found.items() if edges[place] is not None}

    def carrier(self, lane: int, view: View) -> Carrier:
        """Who answers for the module; the rules, for all modules, where nobody else may."""
        group = self.groups[lane]
        if not group.has_overrides:
            known = self._carriers[lane] = RuleCarrier(group, self.survey)
            return known
        extension = group.extensions[0]
        found = registry.override(extension, view.call.module)
        if found is None:
            return RuleCarrier(group, self.survey)
        return found(extension, group.propagator)

    # Reading -------------------------------------------------------------------------------------

    def see_end(self) -> None:
        """Raise if anything was left on its way.

        Raises:
            InternalError: A result would miss it.
        """
        self.schedule.see_end()

    def read(
        self, lane: int, view: View, carrier: Carrier, quantity: Any, trained: Sequence[Trained]
    ) -> None:
        """Let every extension read off parameters of the call's module."""
        group = self.groups[lane]
        if carrier.gives_values:
            for found in values_of(carrier, self.survey, view, trained, quantity):
                self.sink.store(group.extensions[0], found.parameter, found.value)
            return
        if not trained:
            return
        readings = carrier.find(view, trained, quantity)  # before any of it is read
        self.sink.note(lane, group, view, trained, readings)
