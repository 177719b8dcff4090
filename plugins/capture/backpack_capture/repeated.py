"""Writes down the visits of a pass, and runs them in the place of the engine."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import torch
from torch import Tensor

from backpack_capture._torch import generator_states, set_generator_states
from backpack_capture.code import pausing
from backpack_capture.graph import difference_of
from backpack_capture.nested import Apart, HoldsCode
from backpack_capture.program import Operation, Pause, numbers
from backpack_capture.recorder import Recorder
from backpack_capture.tidying import tidy
from backpack_capture.unseen import seen_by, states_of_generators
from backpack_capture.views import with_direct_views
from backpack_capture.visited import (
    Entry,
    Recorded,
    Slot,
    Store,
    Visit,
    alike,
    attributes_of,
    is_changed,
    is_same,
    layout_of,
    turn_of,
    world,
)
from backpack_core.contract.observer import Driver
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.losses import changed_gradient
from backpack_core.errors import InternalError, OverwrittenInputError, PluginCodeError
from backpack_core.plan.structure import Structure
from backpack_core.record.call import Site
from backpack_products.recycled import drop

LARGEST: Final = 2**21  # bytes of a result, of which there are two while it is compared


class _VisitRecorder(Recorder):
    """Writes down a pass, and where tensors were found that no operation had made."""

    def __init__(self) -> None:
        super().__init__((), (), lambda tensor: False)
        self.site: Site | None = None
        self.gradient: Tensor | None = None
        self.slots: dict[int, tuple[int, Slot, tuple[Any, ...]]] = {}
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
                self.slots[number] = self.visits, slot, layout_of(tensor)
                self.note_geometry(number, tensor)
        return super().number_of(tensor)

    def _slot(self, tensor: Tensor) -> Slot | None:
        if self.site is None or self.site.call.is_released:  # it is over, and its node is crossed
            return None
        if tensor is self.gradient:
            return Slot("gradient")
        call, _, (node, *_), _ = self.site
        stored = call.stored
        for what, tensors in (("inputs", stored.inputs), ("outputs", stored.outputs)):
            for number, own in enumerate(tensors):
                if own is tensor:
                    return Slot(what, number)
        for name, (own, _) in stored.owned.items():
            if own is tensor:
                return Slot("owned", name)
        for name in filter(lambda name: name.startswith("_saved_"), dir(node)):
            if is_same(getattr(node, name), tensor):
                return Slot("saved", name)
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

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """By the engine."""
        recorder = self._recorder
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
            self._note(run)
        self._order.append(self._places.index((site.call, site.index)))
        recorder.site, recorder.visits = None, recorder.visits + 1

    def _note(self, run: BackwardPass) -> None:
        """Note what was stored at a visit."""
        noted, recorder = run.sink.noted or [], self._recorder
        stores, made = list[Store](), list[int | None]()
        for extension, parameter, value in noted:
            try:
                apart = Apart(value)
            except (HoldsCode, RecursionError):
                recorder.refusal = "a result holds code"
                return
            if any(tensor.nbytes > LARGEST for tensor in apart.tensors):
                recorder.refusal = "results are so large that it does not matter what calls kernels"
                return
            number = self._parameters.get(id(parameter))
            if number is None or extension.is_deferred:
                recorder.refusal = "a result is not stored on a parameter of the structure"
                return
            count = -1 if isinstance(value, Tensor) else len(apart.tensors)
            stores.append(Store(self._extensions[id(extension)], number, apart, count))
            made += [recorder.number_of(tensor) for tensor in apart.tensors]
            apart.tensors.clear()  # a form is kept, and not what was stored
        run.sink.noted = []
        if recorder.refusal is None:
            pause = Pause("pause", tuple(numbers(made)), recorder.visits)
            recorder.program.steps.append(pause)
            recorder.program.outs += numbers(made)
            self._stores.append(stores)

    def end(self, run: BackwardPass) -> None:
        """Write the program, if one could be written down."""
        recorder, entry = self._recorder, self._entry
        program = recorder.program
        if recorder.refusal is not None:
            entry.refusal = recorder.refusal
            return
        if states_of_generators() != self._drawn:
            recorder.refusal = "it draws random numbers that are not torch's"
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
        entry.recorded = Recorded(visits, code, self._world, self._attributes, program.is_random)

    def _received(self, used: set[int]) -> tuple[list[list[int]], list[Visit]]:
        """What is sent at each visit, of what is used."""
        received, visits = list[list[int]](), list[Visit]()
        known = zip(self._order, self._stores, self._alike, strict=True)
        for number, (place, stores, pattern) in enumerate(known):
            own = {n: s for n, s in self._recorder.slots.items() if s[0] == number and n in used}
            received.append([*own])
            slots = [slot for _, slot, _ in own.values()]
            layouts = [how for *_, how in own.values()]
            visits.append(Visit(place, slots, layouts, stores, pattern))
        return received, visits


class Repeated(Driver):
    """Runs a recording."""

    def __init__(
        self,
        entry: Entry,
        run: BackwardPass,
        structure: Structure,
        given: list[list[Tensor | None]],
    ) -> None:
        assert entry.recorded is not None
        self._recorded, self._entry, self._given = entry.recorded, entry, given
        self._parameters, self._next = structure.parameters, 0
        places = [*structure.sites]
        self._order = {places[v.place]: number for number, v in enumerate(entry.recorded.visits)}
        self.outputs = self._order
        self._program: Generator[Any, Any, None] = entry.recorded.code.run()  # type: ignore[assignment]
        next(self._program)

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """Run what was computed at this visit, and store what was stored."""
        if others is not None and run.context.is_curvature:
            raise changed_gradient(run.view(site, grads[site.edge.output_nr]), others)
        if (site.call, site.index) not in self._order:  # another thread has missed that
            run.let_go(site.call)
            return
        extensions = run.context.extensions
        for store, value in self.results(site, grads[site.edge.output_nr]):
            run.sink.store(extensions[store.extension], self._parameters[store.parameter], value)
        run.let_go(site.call)

    def results(self, site: Site, grad: Tensor | None) -> list[tuple[Store, Any]]:
        """What a visit computes."""
        number, call = self._next, site.call
        if self._order.get((call, site.index)) != number:
            raise InternalError(f"{call.path} was visited in another order than before.")
        self._next += 1
        given, visit = self._given[number], self._recorded.visits[number]
        self._given[number] = []
        for place, slot in enumerate(visit.slots):
            if slot.what == "gradient":
                given[place] = _laid_out(
                    grad, call.stored.outputs[site.index], visit.layouts[place]
                )
            elif slot.what == "saved":
                given[place] = getattr(site.edge.node, slot.key)
            elif is_changed(call, *slot):
                raise OverwrittenInputError(
                    f"{call.path}: what it received, returned or owns was changed in place during "
                    "the backward pass, so derivatives would be computed with other values. "
                    "Change it afterwards."
                )
        found, place = self._program.send(given) if given else next(self._program), 0
        values = list[tuple[Store, Any]]()
        for store in visit.stores:
            if store.size < 0:
                value, place = found[place], place + 1
            else:
                value = store.value.put_together(found[place : place + store.size])
                place += store.size
            values.append((store, value))
        return values

    def end(self, run: BackwardPass) -> None:
        """See that nothing is missing."""
        if self._next < len(self._recorded.visits):
            raise InternalError("A backward pass did not get to calls that it got to before.")


class Compared(Repeated):
    """Runs a recording and the engine, whose results count."""

    def __init__(self, entry: Entry, *what: Any) -> None:
        super().__init__(entry, *what)
        self.outputs = None

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """Both; the engine draws the same random numbers."""
        places = self._order
        if (site.call, site.index) not in places:
            run.between.reach(run, site, grads, others)
            return
        is_random = self._recorded.is_random
        states = generator_states() if is_random else ()
        expected = self.results(site, grads[site.edge.output_nr])
        if is_random:
            set_generator_states(states)
        run.sink.noted = []
        run.between.reach(run, site, grads, others)
        self._compare(run, expected, site)

    def _compare(self, run: BackwardPass, ours: list[tuple[Store, Any]], site: Site) -> None:
        extensions, noted = run.context.extensions, run.sink.noted or []
        same = len(ours) == len(noted)
        for (store, value), (extension, parameter, right) in zip(ours, noted, strict=False):
            same &= extensions[store.extension] is extension
            same &= self._parameters[store.parameter] is parameter
            pairs = zip(Apart(value).tensors, Apart(right).tensors, strict=True)
            same &= not any(difference_of(ours, its) for ours, its in pairs)
        if not same:
            who = f"{type(site.call.rule).__module__}, or {type(extensions[0]).__module__},"
            self._entry.recorded, self._entry.refusal = None, "it computes something else now"
            raise PluginCodeError(
                f"{site.call.path}: the plugin {who} has said that it only computes, so that the "
                "same operations serve every pass of one structure, and computed something else "
                f"than before. {self._entry.uses} passes may be wrong. Take "
                'declare_only_computes() out of the plugin, or write check="always".'
            )


def _laid_out(grad: Tensor | None, output: Tensor, layout: tuple[Any, ...]) -> Tensor:
    """A gradient, as the recorded one lay in memory."""
    grad = torch.zeros_like(output) if grad is None else grad
    if layout_of(grad) == layout:
        return grad
    laid = torch.empty_strided(output.shape, layout[1], dtype=grad.dtype, device=grad.device)
    return laid.copy_(grad)
