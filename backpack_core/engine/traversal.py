"""Takes quantities from call to call, and lets extensions read off at parameters.

A :class:`Traversal` knows what waits where. Who decides the order of the visits is left open:
autograd does (``backward.py``), or an order made beforehand (``sweep.py``). So is where values go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from backpack_core._torch import Node, will_execute
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator, see_through
from backpack_core.engine.carriers import (
    Carrier,
    HandWrittenCarrier,
    RuleCarrier,
    allows_fallback,
    located,
    located_between,
    tolerates,
)
from backpack_core.engine.ownership import owned
from backpack_core.errors import OverwrittenInputError, UnsupportedError
from backpack_core.graph import nodes
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.plugins.refusals import nothing_arrived
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.owner import name_of_parameter
from backpack_core.record.view import View


class Group(NamedTuple):
    """Extensions that share a propagator; a *slot* is a position in the list of groups."""

    propagator: Propagator
    extensions: tuple[Extension, ...]
    needs: frozenset[Any]


class Waiting(NamedTuple):
    """What was sent to a place.

    Attributes:
        wide: From nodes between calls, for the whole batch.
        own: From calls, for the samples that take part.
    """

    wide: Any = None
    own: Any = None


NOTHING = Waiting()


class Pending(NamedTuple):
    """Readings of a parameter with several uses, and where the last one was."""

    readings: list[Any]
    view: View
    name: str
    parameter: Tensor
    is_covered: bool


class Traversal(ABC):
    """What waits where, and what happens when a call is visited.

    Attributes:
        survey: What is known about the graph.
        groups: Extensions by propagator.
        kept: What calls have computed for all columns that pass through them.
    """

    def __init__(self, survey: Survey, groups: list[Group]) -> None:
        self.survey = survey
        self.groups = groups
        self.kept: dict[Call, dict[Any, Any]] = {}
        self._at_sites: dict[tuple[int, Call, int], Waiting] = {}
        self._at_nodes: dict[Node, dict[int, dict[int, Any]]] = {}
        self._pending: dict[tuple[int, int], Pending] = {}

    @abstractmethod
    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Take the value an extension computed for a parameter."""

    @abstractmethod
    def await_node(self, node: Node) -> None:
        """Something waits at a node for the first time: see to it that :meth:`cross` is called."""

    def await_site(self, site: Site) -> None:
        """Something waits at a call for the first time: autograd calls back by itself."""
        return

    @abstractmethod
    def shed(self, slot: int, site: Site, view: View, carrier: Carrier, quantity: Any) -> Any:
        """What to carry on from a call; the rest is carried through at once."""

    @abstractmethod
    def add_residuals(self, slot: int, site: Site, view: View, inputs: dict[int, Any]) -> None:
        """Add what comes into being at a call to what goes to its inputs."""

    # A visit -------------------------------------------------------------------------------------

    def visit(self, slot: int, site: Site, view: View) -> None:
        """Read off and send on, for one group at one output of one call.

        Args:
            slot: Which group.
            site: The place.
            view: What a rule sees of the call: all samples.
        """
        propagator, extensions, _ = self.groups[slot]
        first = extensions[0] if extensions else None
        view = view.subsample(propagator.subsampling)
        arrived = self._at_sites.pop((slot, site.call, site.index), NOTHING)
        carrier = self._carrier(slot, view)
        with located(view, first):
            quantity = carrier.arrive(view, self._at_output(propagator, site, view, arrived))
            if quantity is None and not view.is_reached:
                quantity = propagator.nothing(view)
            if quantity is None and not carrier.starts(view):
                raise nothing_arrived(view, type(first).__name__)
            is_shared = self.survey.is_shared and quantity is not None
            whole = propagator.rooted(quantity) if is_shared else quantity
        self._read(slot, view, carrier, whole)
        if not propagator.travels:
            return
        with located(view, first):
            if site.layout is None and not view.axis:  # else what is below has another shape
                whole = self.shed(slot, site, view, carrier, whole)
                arrived = arrived if whole is quantity else NOTHING
            self.send(slot, site, view, carrier, whole, arrived)

    def send(
        self,
        slot: int,
        site: Site,
        view: View,
        carrier: Carrier,
        quantity: Any,
        arrived: Waiting = NOTHING,
    ) -> None:
        """Send the quantity on to the inputs of the call, or into the graph inside it."""
        call = site.call
        is_rule = isinstance(carrier, RuleCarrier)
        starts_everywhere = self.groups[slot].propagator.starts_everywhere
        goes_inside = starts_everywhere if call.rule.is_loss else call.goes_inside
        if is_rule and goes_inside:
            self._send_below(slot, site, quantity, arrived)
            return
        if all(edge is None for edge in call.edges):
            return  # nothing before this call wants the quantity
        try:
            inputs = carrier.send(view, quantity)
            if is_rule and not call.rule.is_loss:
                self.add_residuals(slot, site, view, inputs)
        except OverwrittenInputError:
            # Autograd kept its own copy: go through the node that made the output.
            self._send_below(slot, site, quantity, arrived)
            return
        for position, arriving in inputs.items():
            edge = call.edges[position]
            if edge is not None:
                self.deliver(slot, edge, own=arriving)

    def _send_below(self, slot: int, site: Site, quantity: Any, arrived: Waiting) -> None:
        """Go on through the node that made the output."""
        if arrived == NOTHING or self.groups[slot].propagator.starts_everywhere:
            self.deliver(slot, site.below, own=quantity)
        else:
            self.deliver(slot, site.below, *arrived)

    def _at_output(self, propagator: Propagator, site: Site, view: View, arrived: Waiting) -> Any:
        """What arrived, as a quantity at the call's output with samples in front."""
        wide, own = arrived
        if own is not None and view.axis:
            own = propagator.map(own, lambda mat: mat.movedim(1 + view.axis, 1))
        if wide is None:
            return own
        if site.layout is not None:
            wide = see_through(propagator, wide, site.layout)
        if view.axis:
            wide = propagator.map(wide, lambda mat: mat.movedim(1 + view.axis, 1))
        narrow = propagator.narrow(wide)
        return narrow if own is None else propagator.merge(own, narrow)

    def _carrier(self, slot: int, view: View) -> Carrier:
        propagator, extensions, _ = self.groups[slot]
        # An extension with overrides has a group of its own, so looking at the first is enough.
        found = registry.override(extensions[0], view.call.module) if extensions else None
        if found is None:
            return RuleCarrier(propagator)
        return HandWrittenCarrier(found, propagator, extensions[0])

    # Reading -------------------------------------------------------------------------------------

    def _read(self, slot: int, view: View, carrier: Carrier, quantity: Any) -> None:
        """Let every extension read off every parameter of the call's module."""
        _, extensions, needs = self.groups[slot]
        if not extensions:
            return
        beside: dict[Any, Any] = {}
        with located(view, extensions[0]):
            for name, parameter, value, _ in carrier.values(view, quantity):
                self._refuse_shared(parameter, name)
                self.store(extensions[0], parameter, value)
            readings = list(carrier.readings(view, quantity))
            for name, parameter, *_ in readings:
                self._refuse_bare(parameter, name, view, extensions)
        for name, parameter, reading, is_covered in readings:
            reading.kept, reading.beside, reading.needs = view.kept, beside, needs
            self._note(slot, Pending([reading], view, name, parameter, is_covered))

    def _note(self, slot: int, new: Pending) -> None:
        """Read, if this is the last use of the parameter; else wait for the others."""
        # The sum over uses comes before anything that is not linear in them.
        key = (slot, id(new.parameter))
        known = self._pending.pop(key, None)
        if known is not None:
            is_covered = known.is_covered and new.is_covered
            new = new._replace(readings=known.readings + new.readings, is_covered=is_covered)
        if self.is_complete(new):
            self.complete(slot, new)
        else:
            self._pending[key] = new

    def is_complete(self, pending: Pending) -> bool:
        """Whether all uses of a parameter were visited."""
        return len(pending.readings) == self.survey.uses[id(pending.parameter)].count

    def complete(self, slot: int, pending: Pending) -> None:
        """Let all extensions of a group read off one parameter."""
        readings, view, name, parameter, is_covered = pending
        for extension in self.groups[slot].extensions:
            with located(view, extension):
                if not is_covered and not allows_fallback(extension, view):
                    continue
                try:
                    whole = readings[0] if len(readings) == 1 else join(readings)
                    readings = [whole]
                    value = extension.read(whole)
                except UnsupportedError as error:
                    if not tolerates(extension, view, name, error):
                        raise
                    continue
                value = extension.as_stored(value, parameter)
                self.store(extension, parameter, owned(value, view))

    def _refuse_shared(self, parameter: Tensor, name: str) -> None:
        used = self.survey.uses.get(id(parameter))
        if (used is not None and used.count > 1) or id(parameter) in self.survey.bare:
            raise UnsupportedError(
                f"The parameter {name!r} is used more than once, which a module extension cannot "
                "account for: write a layer rule instead."
            )

    def _refuse_bare(
        self, parameter: Tensor, name: str, view: View, extensions: tuple[Extension, ...]
    ) -> None:
        if extensions and id(parameter) in self.survey.bare:
            operation = nodes.name_of(self.survey.bare[id(parameter)][1])
            path = name_of_parameter([view.call.module], parameter) or name
            raise UnsupportedError(
                f"The parameter {path!r} is also used by the operation {operation!r} outside "
                f"of any module, so '{extensions[0].savefield}' would miss that part. Apply the "
                "parameter through a module (nn.Linear with a tied weight, say)."
            )

    # What waits ----------------------------------------------------------------------------------

    def waits_at(self, slot: int, site: Site) -> bool:
        """Whether something arrived at an output of a call."""
        return (slot, site.call, site.index) in self._at_sites

    def is_empty(self) -> bool:
        """Whether everything that was sent has arrived, and been read."""
        return not (self.is_on_its_way() or self._pending)

    def is_on_its_way(self) -> bool:
        """Whether something that was sent has not arrived."""
        return bool(self._at_sites or self._at_nodes)

    def deliver(self, slot: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """Leave a quantity at an edge, to wait for a visit.

        Args:
            slot: Which group it belongs to.
            edge: Where it goes: to a call, or to a node between calls.
            wide: What comes from nodes, for the whole batch.
            own: What comes from calls, for the samples that take part.
        """
        if will_execute(edge.node):
            self.leave_at(slot, edge, wide, own)

    def leave_at(self, slot: int, edge: Edge, wide: Any = None, own: Any = None) -> None:
        """The same where autograd is known to get."""
        propagator = self.groups[slot].propagator
        site = self.survey.site_at(edge)
        if site is not None:
            key = (slot, site.call, site.index)
            if key not in self._at_sites:
                self.await_site(site)
            before = self._at_sites.get(key, NOTHING)
            added = (_add(propagator.merge, a, b) for a, b in zip(before, (wide, own), strict=True))
            self._at_sites[key] = Waiting(*added)
            return
        if own is not None:
            widened = propagator.widen(own, self.survey.batch_size)
            wide = _add(propagator.merge, wide, widened)
        if edge.node not in self._at_nodes:
            self._at_nodes[edge.node] = {}
            self.await_node(edge.node)
        waiting = self._at_nodes[edge.node].setdefault(slot, {})
        waiting[edge.output_nr] = _add(propagator.merge, waiting.get(edge.output_nr), wide)

    def cross(self, node: Node) -> None:
        """Push what waits at a node through it."""
        for slot, quantities in self._at_nodes.pop(node, {}).items():
            propagator, extensions, _ = self.groups[slot]
            first = extensions[0] if extensions else None
            with located_between(self.survey, first, node):
                crossed = propagator.cross(node, quantities, self.survey.batch_size)
            if not crossed:
                continue
            edges: dict[int, Edge] = dict(edges_behind(node))
            for position, quantity in crossed:
                edge = edges.get(position)
                if edge is not None and not nodes.is_leaf(edge.node):
                    self.deliver(slot, Edge(edge.node, edge.output_nr), wide=quantity)


def join(readings: list[Any]) -> Any:
    """One reading from those of all uses of a parameter."""
    first, *others = readings
    whole = first.join(others) if others else first
    last = readings[-1]
    for name in ("name", "path", "module", "rule", "kept", "beside", "needs"):
        setattr(whole, name, getattr(last, name))
    whole.is_linear = all(reading.is_linear for reading in readings)
    return whole


def _add(merge: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """The sum, where ``None`` is nothing."""
    if first is None or second is None:
        return second if first is None else first
    return merge(first, second)
