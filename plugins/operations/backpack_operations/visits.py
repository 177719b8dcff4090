"""Visits in any graph: opened calls, columns kept apart by sample, samples on other axes.

A quantity at a call is *wide* if it is for the whole batch, with samples as they lie in the tensor
(so at operations). It is *own* if it is for the samples that take part, with these on axis 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.propagator import Propagator, Reading
from backpack_core.engine.schedule import NOTHING, Schedule, Waiting
from backpack_core.engine.sink import Sink
from backpack_core.engine.traversal import RuleCarrier, Visit
from backpack_core.errors import InternalError, OverwrittenInputError, SampleMixingError
from backpack_core.graph import Trained
from backpack_core.record.call import Edge, Site
from backpack_core.record.storage import storage
from backpack_core.record.view import View
from backpack_operations.bare import BareRule
from backpack_operations.carrier import carrier_of, values_of
from backpack_operations.entering_ids import is_of_buffers
from backpack_operations.inside import Later, read_here
from backpack_operations.of_weights import Origins
from backpack_operations.owners import rows_at_loss
from backpack_operations.readings import at_leaf, of_samples
from backpack_operations.straight import StraightTraversal
from backpack_operations.survey import GraphSurvey
from backpack_operations.viewed import below, look_back, look_through
from backpack_products.overrides import override
from backpack_products.product import IS_TABLE
from backpack_products.substitutes import is_parameter


class GraphTraversal(StraightTraversal):
    """Visits calls in any graph."""

    survey: GraphSurvey

    def __init__(self, schedule: Schedule, sink: Sink) -> None:
        super().__init__(schedule, sink)
        self._alignment = self.survey.alignment
        self.inside: dict[Node, list[Later]] = {}  # by the node that autograd must reach

    def arrive(self, visit: Visit) -> Any:
        """The quantity that arrived; at a loss with several entries per sample, split by entry."""
        lane, site, view, *_ = visit
        quantity, propagator = super().arrive(visit), self.groups[lane].propagator
        if view.positions > 1 and site.call.rule.is_loss and propagator.travels:
            if (chosen := propagator.subsampling) is not None:
                return propagator.split_positions(quantity, view.owners, len(chosen))
            owners = rows_at_loss(self.survey, site[:2])
            return propagator.split_positions(quantity, owners, self.survey.batch_size)
        return quantity

    def hand_on(self, visit: Visit, edge: Edge, quantity: Any) -> None:
        """Send a quantity along an edge, wide unless the samples have one entry each."""
        propagator, view = self.groups[visit.lane].propagator, visit.view
        if propagator.subsampling is None or (view.positions == 1 and self._has_one_entry(edge)):
            super().hand_on(visit, edge, quantity)
        else:
            self.schedule.deliver(visit.lane, edge, wide=self._widened(visit, quantity))

    def _has_one_entry(self, edge: Edge) -> bool:
        """Whether samples have one entry each at an edge."""
        to = self.survey.site_at(edge)
        # At a view that was overwritten, the base arrives, whose shape says nothing.
        return to is None or to.layout is not None or self.survey.axis_and_positions(to)[1] == 1

    def _widened(self, visit: Visit, quantity: Any) -> Any:
        """Extend a quantity at a call from the samples that take part to the whole batch."""
        view, propagator = visit.view, self.groups[visit.lane].propagator
        if view.positions > 1:
            owners = view.full.owners
            entries = view.samples * view.positions if owners is None else len(owners)
            return propagator.widen(quantity, entries, view)
        if not view.positions and not self._alignment.is_apart(visit.site.edge):
            return quantity  # it has the whole batch
        return propagator.widen(quantity, self.survey.batch_size)

    def look(self, visit: Visit, quantity: Any, whole: Any) -> None:
        """Read a call's parameters; check, and send, columns that are kept apart by sample."""
        lane, site, view, carrier, arrived = visit
        group = self.groups[lane]
        if not view.positions and group.propagator.keeps_apart:
            self._check_apart(view, group.propagator, quantity)
        if site.call.rule.reads_inside and arrived is NOTHING and group.extensions:
            self.read(lane, view, carrier, whole, read_here(self, lane, view, carrier, whole))
        else:
            super().look(visit, quantity, whole)
        if self._alignment.apart and self._sends_apart(lane, site):
            self._send_apart(visit, quantity)

    def send_rest(self, visit: Visit, quantity: Any) -> None:
        """Send a quantity on to the inputs of the call, or into the graph inside it."""
        lane, site, view, carrier, _ = visit
        call, propagator = site.call, self.groups[lane].propagator
        goes_inside = call in self.survey.opened
        if call.rule.is_loss:
            goes_inside = propagator.goes_inside(quantity)
        if goes_inside and not carrier.gives_values:
            self._send_below(visit, quantity)
            return
        if not any(call.edges):
            return
        if view.positions and not self._alignment.apart:
            super().send_rest(visit, quantity)
            return
        try:
            inputs = self.sent(visit, quantity)
        except OverwrittenInputError:
            self._send_below(visit, quantity)
            return
        for position, arriving in inputs.items():
            edge = call.edges[position]
            # ``look`` has sent what is kept apart; the dye alone passes here.
            is_sent = propagator.keeps_apart or not propagator.starts_everywhere
            is_apart = edge is not None and self._alignment.is_apart(edge)
            if edge is not None and not (is_sent and is_apart):
                if view.positions:
                    self.hand_on(visit, edge, arriving)
                elif not self._alignment.is_apart(site.edge):
                    self.schedule.deliver(lane, edge, wide=arriving)  # it has the whole batch
                else:
                    wide = self._widened(visit, arriving)
                    entries = self._alignment.entries_at(edge)
                    self.schedule.deliver(lane, edge, wide=propagator.put_together(wide, entries))

    def see_end(self) -> None:
        """Raise an error if anything still waits, including a parameter inside a module."""
        super().see_end()
        if self.inside:
            raise InternalError("A parameter inside of a module was left unread.")

    def carrier(self, lane: int, view: View) -> Any:
        """The carrier of a call: no override for a parameter that operations use.

        Raises:
            BackpackError: An override would answer for a call with samples elsewhere.
        """
        group, is_leaf = self.groups[lane], isinstance(view.call.rule, BareRule)
        if not group.has_overrides:
            return super().carrier(lane, view)
        carrier = None if is_leaf else carrier_of(group, view)
        if carrier is None:
            return RuleCarrier(group)
        if fault := self._alignment.faults.get((view.call, view.index)):
            raise fault
        return carrier

    def read(
        self, lane: int, view: View, carrier: Any, quantity: Any, trained: Sequence[Trained]
    ) -> None:
        """Read parameters, from columns of each sample apart if rows are in no order."""
        group = self.groups[lane]
        is_leaf = group.has_overrides and isinstance(view.call.rule, BareRule)
        if is_leaf and override(group.extensions[0], view.call.module) is not None:
            return  # the override answered for the parameter when the module was visited
        if carrier.gives_values:
            for found in values_of(carrier, self.survey, view, trained, quantity):
                self.sink.store(group.extensions[0], found.parameter, found.value)
            return
        if self._alignment.apart and trained and not view.positions:
            view.call_cache[IS_TABLE] = self._is_table(view)
        if self._alignment.owned and trained:
            quantity = self._of_samples(view, group.propagator, quantity)
        if not trained:
            return
        if view.stored.computed or view.positions > 1:
            readings = self._readings(lane, view, carrier, quantity, trained)
        else:
            readings = carrier.find(view, trained, quantity)
        self.sink.note(lane, group, view, trained, readings)

    def _is_table(self, view: View) -> bool:
        """Whether a call received parameters and buffers alone: then all samples share its rows."""
        call, node = view.call, self.survey.sites[view.call, view.index].edge.node
        is_frozen = not any(call.edges) and all(map(is_parameter, call.stored.inputs))
        return is_frozen or is_of_buffers(call) or Origins(self.survey).of_weights(node)

    def _readings(
        self, lane: int, view: View, carrier: Any, quantity: Any, trained: Sequence[Trained]
    ) -> list[Reading]:
        """The readings of samples with several entries, and of parameters that are computed."""
        at = {own.name: own for own in trained}  # a computed parameter may have several leaves
        found = carrier.find(view, [*at.values()], quantity)
        if view.positions > 1:
            chosen = self.groups[lane].propagator.subsampling
            count = self.survey.batch_size if chosen is None else len(chosen)
            found = [of_samples(each, count, view.call_cache) for each in found]
        of_name = dict(zip(at, found, strict=True))
        return [
            of_name[own.name] if own.parameter is own.used else _at_leaf(of_name[own.name], own)
            for own in trained
        ]

    def _at_output(self, propagator: Propagator, site: Site, view: View, arrived: Waiting) -> Any:
        """Combine what arrived into one quantity of the samples that take part, on axis 0."""
        wide, own = arrived
        if own is not None and view.axis:
            own = propagator.map(own, lambda mat: mat.movedim(1 + view.axis, 1))
        if wide is None:
            return own
        if site.layout is not None:
            wide = propagator.map(wide, partial(look_through, site.layout))
        if view.axis:
            wide = propagator.map(wide, lambda mat: mat.movedim(1 + view.axis, 1))
        # With samples on another axis, the quantity stays as it is.
        if view.positions or self._alignment.is_apart(site.edge):
            wide = propagator.narrow(wide, view if view.positions > 1 else None)
        return wide if own is None else propagator.merge(own, wide)

    def _of_samples(self, view: View, propagator: Propagator, quantity: Any) -> Any:
        """Take a quantity apart by sample where rows are in no order, by the mask of owned rows."""
        owned = self._alignment.owned_of(self.survey.sites[view.call, view.index])
        if owned is None or quantity is None or not propagator.keeps_apart:
            return quantity
        return propagator.take_apart(quantity, owned)

    def _sends_apart(self, lane: int, site: Site) -> bool:
        """Whether columns are kept apart behind a call, or stop being so and must be checked."""
        call, alignment = site.call, self._alignment
        if call.rule.is_loss:
            return False
        if call in self.survey.opened:
            # The nodes inside keep columns apart, from the last tensors with samples on.
            return alignment.is_apart(site.edge)
        ends = alignment.is_apart(site.edge) and not self.groups[lane].propagator.travels
        return any(edge is not None and (ends or alignment.is_apart(edge)) for edge in call.edges)

    def _send_apart(self, visit: Visit, quantity: Any) -> None:
        """Send columns that are kept apart by sample to the inputs that have no samples."""
        lane, site, view, carrier, _ = visit
        propagator, call = self.groups[lane].propagator, site.call
        if not propagator.keeps_apart or quantity is None:
            return
        if call in self.survey.opened:
            if propagator.travels:
                return
            if site.layout is None:
                self.hand_on(visit, below(site), quantity)
            else:
                wide = self._widened(visit, quantity)
                wide = propagator.map(wide, partial(look_back, site.layout))
                self.schedule.deliver(lane, below(site), wide=wide)
            return
        if view.positions:  # for all samples, since an input without samples cannot be narrowed
            quantity = propagator.take_apart(self._widened(visit, quantity), view.positions)
            view = view.full
        else:
            quantity = self._of_samples(view, propagator, quantity)
        is_wide = bool(view.positions)
        for position, arriving in carrier.send(view, quantity).items():
            edge = call.edges[position]
            if edge is None:
                continue
            if self._alignment.is_apart(edge):
                own, wide = (None, arriving) if is_wide else (arriving, None)
                self.schedule.deliver(lane, edge, wide=wide, own=own)
            elif not view.positions and not propagator.travels:  # only to check that they fit
                wide = self._widened(visit, arriving)
                propagator.put_together(wide, self._alignment.entries_at(edge))

    def _check_apart(self, view: View, propagator: Propagator, quantity: Any) -> None:
        """Check that columns kept apart by sample fit an axis of the samples.

        The columns of a sample must be zero at the entries of others, on some axis that is as long
        as the batch. If no axis was declared, this is axis 0 of a layer's output.

        Raises:
            SampleMixingError: They fit no such axis.
        """
        samples, call = self.survey.batch_size, view.call
        axes = [axis for axis, n in enumerate(view.output_shape) if n == samples]
        if not self.survey.is_declared:
            is_kept = any(tensor.shape[:1] == (samples,) for tensor in call.stored.inputs)
            is_kept &= call.receives_input > 1 and axes[:1] == [0] and not call.goes_inside
            axes = axes[:is_kept]
        site = self.survey.sites[call, view.index]
        edge = site.edge
        if samples == 1 or quantity is None or not self._alignment.is_apart(edge):
            return
        quantity = propagator.widen(quantity, samples)
        owned = self._alignment.owned_of(site)
        if owned is not None:
            propagator.put_together(quantity, owned)
            return
        # At a view that was overwritten, they are those of its base, which has other axes.
        ids = None if site.layout is not None else self.survey.sample_ids.get(edge[:2])
        positions: int | Tensor = 1
        # Carried ids, or the user's index, say on which axis the samples are, and in which order.
        is_behind = ids is not None and ids.numel() == samples > ids.shape[:1].numel()
        # Of parameters, and of data that are as long as the batch by chance, it says nothing.
        is_told = self.survey.is_told and bool(call.receives_input or any(call.edges))
        if ids is not None and (is_behind or is_told):
            shape = ids.movedim(view.axis, 0).shape if view.axis else ids.shape
            axes = [axis for axis, length in enumerate(shape) if length == ids.numel() > 1]
            shown = torch.arange(samples, device="cpu").unsqueeze(1)
            positions = (ids.flatten() == shown) | (ids.flatten() < 0)
        elif not call.receives_input:
            return
        for axis in axes:
            try:
                moved = propagator.map(quantity, partial(_moved, axis)) if axis else quantity
                propagator.put_together(moved, positions)
            except SampleMixingError:
                if axis == axes[-1]:
                    raise
            else:
                return


def _moved(axis: int, mat: Tensor) -> Tensor:
    """Move an axis of the tensor to the front: columns ``[V, *]``, axis counted without ``V``."""
    return mat.movedim(1 + axis, 1)


def _at_leaf(reading: Reading, own: Trained) -> Reading:
    """The reading at a leaf, pulled back from the parameter that was computed from it."""
    leaf, source = own.parameter, own.used
    pull = partial(storage().pull_back, source=source, leaf=leaf)
    return at_leaf(reading, source, leaf, pull)
