"""Writes down the visits of a pass, which the engine makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from backpack_capture.code import pausing
from backpack_capture.nested import Apart, HoldsCode
from backpack_capture.program import Operation, Pause, numbers
from backpack_capture.recorder import Recorder
from backpack_capture.tidying import tidy
from backpack_capture.unseen import seen_by, states_of_generators
from backpack_capture.views import with_direct_views
from backpack_capture.visited import (
    Entry,
    Recorded,
    Result,
    Slot,
    Store,
    Visit,
    alike,
    attributes_of,
    finished,
    inside,
    is_same,
    layout_of,
    looked_up,
    names_of,
    noted_at_visit,
    setting_of,
    turn_of,
    world,
)
from backpack_core.contract.observer import Driver
from backpack_core.engine.backward import BackwardPass
from backpack_core.plan.structure import Structure
from backpack_core.record.call import Call, Site
from backpack_products.recycled import drop

LARGEST: Final = 2**23  # bytes of a result, of which there are two while it is compared


class _VisitRecorder(Recorder):
    """Writes down a pass, and where tensors were found that no operation had made."""

    reads_are_assumptions = False  # a pass cannot begin anew when one of them turns out wrong

    def __init__(self) -> None:
        super().__init__((), (), lambda tensor: False)
        self.site: Site | None = None
        self.node: Node | None = None  # between calls
        self.between: dict[Node, int] = {}
        self.gradient: Tensor | None = None
        self.slots: dict[int, tuple[int, Slot]] = {}
        self.visits = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds, which never sees a visit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and write it down."""
        return self.run(func, types, args, kwargs or {})

    def number_of(self, tensor: Tensor) -> int | None:
        """The number; of one that the visited call has, from now on."""
        if tensor not in self._numbers:
            slot = self._slot(tensor)
            if slot is not None:
                number = self._enter(tensor)
                self.program.given.append(number)
                # What a node has saved is read at the visit before autograd gets there.
                visit = self.visits if self.node is None else self.visits - 1
                self.slots[number] = visit, slot._replace(layout=layout_of(tensor))
                self.note_geometry(number, tensor)
        return super().number_of(tensor)

    def _slot(self, tensor: Tensor) -> Slot | None:
        if self.node is not None:
            return _saved("between", {self.node: self.between[self.node]}, tensor)
        if self.site is None:
            return None
        if tensor is self.gradient:
            return Slot("gradient")
        slot = None if self.site.call.is_released else _of_call(self.site.call, tensor)
        return slot or _saved("inside", {n: k for k, n in enumerate(inside(self.site))}, tensor)


def _of_call(call: Call, tensor: Tensor) -> Slot | None:
    """Where a call has a tensor; ``None`` if it does not."""
    stored = call.stored
    for what, tensors in (("inputs", stored.inputs), ("outputs", stored.outputs)):
        for number, own in enumerate(tensors):
            if own is tensor:
                return Slot(what, number)
    names = (name for name, (own, _) in stored.owned.items() if own is tensor)
    name = next(names, None)
    return None if name is None else Slot("owned", name)


def _saved(where: str, nodes: Mapping[Node, int], tensor: Tensor) -> Slot | None:
    """Where a node has saved a tensor; ``None`` if none of them has."""
    for node, number in nodes.items():
        for name in names_of(node):
            if is_same(looked_up(node, name), tensor):
                return Slot(where, (number, name, type(node), tensor.shape))
    return None


class Recording(Driver):
    """Has the engine visit calls, and writes down what is computed there."""

    def __init__(self, run: BackwardPass, structure: Structure, entry: Entry) -> None:
        self._entry, self._world, self._attributes = entry, world(), attributes_of(structure)
        self._recorder, self._places = _VisitRecorder(), [*structure.sites]
        self._extensions = {id(e): number for number, e in enumerate(run.context.extensions)}
        self._parameters = {id(p): number for number, p in enumerate(structure.parameters)}
        self._stores, self._order = list[list[Store]](), list[int]()
        self._turns, self._alike = list[int](), list[tuple[int, ...]]()
        self._drawn, run.sink.noted = states_of_generators(), []
        self._recorder.between, self._pause = structure.between, list[Pause]()
        schedule: Any = run.schedule  # without operations, nothing is crossed
        self._cross: Any = getattr(schedule, "cross", None)
        schedule.cross = self.cross
        self._settings = list[tuple[int, str, Any]]()

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """By the engine."""
        recorder = self._recorder
        self._write_pause()
        recorder.site, recorder.gradient = site, grads[site.edge.output_nr]
        if recorder.gradient is None:
            recorder.refusal = "a gradient is undefined"
        if self._turns and turn_of(site) > self._turns[-1]:
            recorder.refusal = "calls are visited in another order than that of autograd"
        self._turns.append(turn_of(site))
        self._alike.append(alike(site.call))  # before it is released
        drop()  # memory that only this pass could write to
        with seen_by(recorder), recorder:
            run.between.reach(run, site, grads, others)
            self._note(noted_at_visit(run))
        self._order.append(self._places.index((site.call, site.index)))
        recorder.site, recorder.visits = None, recorder.visits + 1

    def cross(self, schedule: Any, node: Node, grads: Any = ()) -> None:
        """By the engine. A replay crosses a node at the visit before autograd gets there."""
        recorder = self._recorder
        if node not in schedule.at_nodes:  # nothing waits there
            self._cross(schedule, node, grads)
            return
        number = recorder.between.get(node)
        if number is None or issubclass(type(node), BackwardCFunction):
            recorder.refusal = "it is crossed by code of the model, or where no plan knows"
            self._cross(schedule, node, grads)
            return
        self._settings += [(number, name, setting_of(node, name)) for name in names_of(node)]
        if recorder.site is not None:  # the node of the visited output
            self._cross(schedule, node, grads)
            return
        if not recorder.visits:
            recorder.refusal = "a quantity begins between calls"
        recorder.node = node
        with seen_by(recorder), recorder:
            self._cross(schedule, node, grads)
        recorder.node = None

    def _write_pause(self) -> None:
        self._recorder.program.steps += self._pause
        self._pause.clear()

    def _note(self, results: list[Result]) -> None:
        """Note what was stored at a visit, or at the end."""
        recorder = self._recorder
        stores, made = list[Store](), list[int | None]()
        for extension, parameter, value in results:
            try:
                apart = Apart(value)
            except (HoldsCode, RecursionError):
                recorder.refusal = "a result holds code"
                return
            if any(tensor.nbytes > LARGEST for tensor in apart.tensors):
                recorder.refusal = "results are so large that it does not matter what calls kernels"
                return
            who, number = self._extensions.get(id(extension)), self._parameters.get(id(parameter))
            if who is None or number is None:
                recorder.refusal = "a result is not stored on a parameter of the structure"
                return
            count = -1 if isinstance(value, Tensor) else len(apart.tensors)
            stores.append(Store(who, number, apart, count))
            made += [recorder.number_of(tensor) for tensor in apart.tensors]
            apart.tensors.clear()  # a form is kept, and not what was stored
        if recorder.refusal is None:
            pause = Pause("pause", tuple(numbers(made)), recorder.visits)
            self._pause.append(pause)
            recorder.program.outs += numbers(made)
            self._stores.append(stores)

    def end(self, run: BackwardPass) -> None:
        """Write the program, if one could be written down."""
        recorder, entry = self._recorder, self._entry
        program = recorder.program
        self._write_pause()
        if recorder.refusal is None and run.sink.deferred and not run.sink.noted:
            with seen_by(recorder), recorder:
                self._note(finished(run))
            self._write_pause()
        if recorder.refusal is not None:
            entry.refusal = recorder.refusal
            return
        if states_of_generators() != self._drawn:
            recorder.refusal = "it draws random numbers that are not torch's"
        elif not entry.is_of(run.context.extensions):
            recorder.refusal = "an extension keeps something"
        elif run.sink.noted:
            recorder.refusal = "something is read where there is no call"
        elif len({*program.outs}) < len(program.outs):
            recorder.refusal = "two results are one tensor"
        elif any(not isinstance(step, (Operation, Pause)) for step in program.steps):
            recorder.refusal = "it reads values"
        if recorder.refusal is not None:
            entry.refusal = recorder.refusal
            return
        values, program.fields = [store for stores in self._stores for store in stores], []
        place = 0
        for store in values:
            if store.size < 0:
                program.fields.append(place)
            place += abs(store.size)
        try:
            program = with_direct_views(tidy(program))
            received, visits = self._received({n for s in program.steps for n in s.reads})
            code = pausing(program, received)
        except Exception as error:  # the pass itself is through, and right
            entry.refusal = f"it could not be written ({type(error).__name__}: {error})"
            return
        last = [store for stores in self._stores[len(visits) :] for store in stores]
        sent = {slot.key[:2] for v in visits for slot in v.late if slot.what == "between"}
        settings = [s for s in self._settings if s[2] is not None and s[:2] not in sent]
        taken = self._world, self._attributes, settings
        entry.recorded = Recorded(visits, last, code, *taken, program.is_random)

    def _received(self, used: set[int]) -> tuple[list[list[int]], list[Visit]]:
        """What is sent at each visit, of what is used."""
        received, visits = list[list[int]](), list[Visit]()
        seen = zip(self._order, self._stores, self._alike, strict=False)  # not what is at the end
        for number, (place, stores, pattern) in enumerate(seen):
            known = self._recorder.slots.items()
            own = [(n, slot) for n, (at, slot) in known if at == number and n in used]
            own.sort(key=lambda sent: sent[1].is_late)
            received.append([n for n, _ in own])
            stored, late = [[s for _, s in own if s.is_late is it] for it in (False, True)]
            visits.append(Visit(place, stored, late, stores, pattern))
        return received, visits
