"""What happens at a visit: extensions read at parameters, and quantities go on to the inputs.

The schedule decides the order of visits, and the sink where results go. So the same code serves
autograd's order and any other. A carrier answers for the module: the layer rule, as core has it, or
what a library puts in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from backpack_core.contract.bases import is_of_base
from backpack_core.contract.propagator import Propagator, Reading
from backpack_core.engine.active import Group
from backpack_core.engine.location import nothing_arrived, place
from backpack_core.engine.schedule import NOTHING, Schedule, Waiting, add
from backpack_core.engine.sink import Sink
from backpack_core.errors import ShapeError
from backpack_core.graph import Trained
from backpack_core.record.call import Edge, Site
from backpack_core.record.guards import ask
from backpack_core.record.view import View


class RuleCarrier:
    """The layer rules as carriers; one object answers for all calls of a group."""

    gives_values = False

    def __init__(self, group: Group) -> None:
        self._propagator = self.speaker = group.propagator
        self._needs = group.needs
        self._products = _asked(group.propagator, "products")
        self._propagate = _asked(group.propagator, "propagate")

    def starts(self, view: View) -> bool:
        """No: the propagator starts the quantity, at a loss."""
        return False

    def arrive(self, view: View, waiting: Any) -> Any:
        """The quantity at the output; at a loss, the propagator starts one."""
        arrived = self._propagator.arrive(view.call.rule, view, waiting)
        if arrived is None and view.call.rule.is_loss:
            raise _wrong(self._propagator, "start", None, view, "the quantity at its input")
        return arrived

    def find(self, view: View, trained: Sequence[Trained], quantity: Any) -> list[Reading]:
        """The propagator's reading for each parameter, with module, name and rule noted on it."""
        rule, module = view.call.rule, view.call.module
        names, *_ = zip(*trained, strict=True)
        found = self._products(rule, view, names, quantity)
        if view.is_checked:
            is_list = isinstance(found, (list, tuple)) and len(found) == len(names)
            if not is_list or not all(isinstance(reading, Reading) for reading in found):
                what = f"a list with a reading for each of {[*names]}"
                raise _wrong(self._propagator, "products", found, view, what)
        beside: dict[Any, Any] = {}
        for name, reading in zip(names, found, strict=True):
            reading.name, reading.module, reading.rule = name, module, type(rule)
            reading.call_cache, reading.column_cache = view.call_cache, beside
            reading.needs, reading.is_measured = self._needs, view.is_measured
        return list(found)

    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """The quantities at the inputs, by position; a loss hands its own to the first input."""
        rule = view.call.rule
        if rule.is_loss:
            return {0: quantity}
        found = self._propagate(rule, view, quantity)
        return _by_input(self._propagator, "propagate", found, view)


def _by_input(propagator: Propagator, method: str, found: Any, view: View) -> dict[int, Any]:
    """What a propagator returned for the inputs of a call, if that is what it must be."""
    count = len(view.stored.inputs)
    if view.is_checked and not (isinstance(found, dict) and found.keys() <= {*range(count)}):
        expected = f"a dictionary from positions of its {count} inputs to quantities"
        raise _wrong(propagator, method, found, view, expected)
    return found  # type: ignore[no-any-return]


def _wrong(propagator: Propagator, method: str, found: Any, view: View, what: str) -> ShapeError:
    said = f"{type(propagator).__name__}.{method} returned {found!r:.200} at {view.path}"
    return ShapeError(f"{said}, expected {what}.")


def _asked(propagator: Propagator, method: str) -> Callable[..., Any]:
    """A method of the propagator, guarded unless it is that of a base class."""
    own: Callable[..., Any] = getattr(propagator, method)
    if is_of_base(own):
        return own
    return lambda rule, view, *given: ask(view, propagator, method, rule, view, *given)


class Visit(NamedTuple):
    """One group at one output of one call.

    Attributes:
        lane: The index of the group.
        site: The output.
        view: What a rule sees of the call: the samples that take part.
        carrier: The object that answers for the module.
        arrived: What was sent there.
    """

    lane: int
    site: Site
    view: View
    carrier: Any
    arrived: Waiting = NOTHING


class Traversal:
    """What happens when a call is visited. Libraries derive from it, for graphs beyond chains.

    Attributes:
        schedule: Where quantities wait.
        sink: Where values go.
    """

    def __init__(self, schedule: Schedule, sink: Sink) -> None:
        self.survey, self.groups = schedule.survey, schedule.groups
        self.schedule = schedule
        self.sink = sink
        self._carriers: dict[int, RuleCarrier] = {}

    def visit(self, lane: int, site: Site, view: View) -> None:
        """At one output of a call, let one group's extensions read, and send its quantity on.

        Args:
            lane: The index of the group.
            site: The output.
            view: What a rule sees of the call: all samples.
        """
        group = self.groups[lane]
        propagator = group.propagator
        try:
            carrier = self._carriers.get(lane) or self.carrier(lane, view)
            this = Visit(lane, site, view, carrier, self.schedule.take(lane, site))
            quantity = self.arrive(this)
            if quantity is None and not view.is_reached:
                quantity = propagator.nothing(view)
            if quantity is None and not carrier.starts(view):
                raise nothing_arrived(view, type(group.first).__name__)
            is_shared = self.survey.is_shared and quantity is not None
            whole = propagator.rooted(quantity) if is_shared else quantity
            self.look(this, quantity, whole)
            if propagator.travels:
                self.send(this, quantity, whole)
        except Exception as error:
            place(error, view, group.first)
            raise

    def arrive(self, visit: Visit) -> Any:
        """The quantity at the call's output, from what arrived there."""
        return visit.carrier.arrive(visit.view, visit.arrived.own)

    def look(self, visit: Visit, quantity: Any, whole: Any) -> None:
        """Have extensions read.

        Args:
            visit: The visit.
            quantity: The quantity at the output.
            whole: The same quantity, in the form in which uses of a parameter can be added.
        """
        lane, site, view, carrier, _ = visit
        if self.groups[lane].extensions:
            self.read(lane, view, carrier, whole, self.survey.trained[site.call])

    def send(self, visit: Visit, quantity: Any, whole: Any) -> None:
        """Send the quantity on to the inputs of the call; see :meth:`look` for the arguments."""
        edges = visit.site.call.edges
        if not any(edges):
            return  # no gradient goes to any input
        for position, arriving in self.sent(visit, whole).items():
            edge = edges[position]
            if edge is not None:
                self.hand_on(visit, edge, arriving)

    def hand_on(self, visit: Visit, edge: Edge, quantity: Any) -> None:
        """Deliver what a call sends to an input."""
        self.schedule.deliver(visit.lane, edge, own=quantity)

    def sent(self, visit: Visit, quantity: Any) -> dict[int, Any]:
        """What goes to the inputs of the call, by position."""
        inputs: dict[int, Any] = self.carried(visit, quantity)
        if not visit.carrier.gives_values and not visit.site.call.rule.is_loss:
            merge = self.groups[visit.lane].propagator.merge
            for position, new in self.residuals(visit).items():
                inputs[position] = add(merge, inputs.get(position), new)
        return inputs

    def carried(self, visit: Visit, quantity: Any) -> Any:
        """What the carrier sends to the inputs of the call, by position."""
        return visit.carrier.send(visit.view, quantity)

    def residuals(self, visit: Visit) -> dict[int, Any]:
        """The residual terms that a call adds, by position of the input."""
        (call, *_), view, own = visit.site, visit.view, self.groups[visit.lane].propagator
        found = _by_input(own, "residual", ask(view, own, "residual", call.rule, view), view)
        return {place: new for place, new in found.items() if call.edges[place] is not None}

    def carrier(self, lane: int, view: View) -> Any:
        """The object that answers for the module; core's answers for all."""
        known = self._carriers[lane] = RuleCarrier(self.groups[lane])
        return known

    # Reading -------------------------------------------------------------------------------------

    def see_end(self) -> None:
        """Raise if a quantity was sent and did not arrive.

        Raises:
            InternalError: Some result would miss it.
        """
        self.schedule.see_end()

    def read(
        self, lane: int, view: View, carrier: Any, quantity: Any, trained: Sequence[Trained]
    ) -> None:
        """Have every extension of a group read the parameters of the call's module."""
        if trained:
            readings = carrier.find(view, trained, quantity)  # before any of it is read
            self.sink.note(lane, self.groups[lane], view, trained, readings)
