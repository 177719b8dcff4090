"""Records the visits of a pass while the engine makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from backpack_capture.code import pausing
from backpack_capture.nested import Apart, HoldsCode
from backpack_capture.program import Operation, Pause, numbers
from backpack_capture.recorder import Recorder
from backpack_capture.saved import (
    form_inside,
    inside,
    is_same,
    laid_apart,
    layout_of,
    looked_up,
    names_of,
    setting_of,
)
from backpack_capture.tidying import tidy
from backpack_capture.unseen import seen_by, states_of_generators
from backpack_capture.views import with_direct_views
from backpack_capture.visited import (
    Entry,
    Number,
    Place,
    Recorded,
    Result,
    Slot,
    Store,
    Visit,
    alike,
    attributes_of,
    finished,
    noted_at_visit,
    turn_of,
    world,
)
from backpack_core.engine.backward import BackwardPass
from backpack_core.record.call import Site, Stored
from backpack_operations.nodes import setting_names
from backpack_operations.observer import Driver
from backpack_operations.structure import Structure
from backpack_products.recycled import drop

LARGEST: Final = 2**23  # bytes of a result; a comparison holds two of them


class _VisitRecorder(Recorder):
    """Records a pass, and where tensors were found that no operation had made."""

    reads_are_assumptions = False  # a pass cannot start again if one of them proves wrong

    def __init__(self) -> None:
        super().__init__((), (), lambda tensor: False)
        self.site: Site | None = None
        self.node: Node | None = None  # between calls, or inside of one that was visited before
        self.number: Number | None = None  # of this node
        self.around: Stored | None = None  # what this call has stored
        self.before = 0  # the visit that gets what is there before autograd is at this node
        self.between: dict[Node, int] = {}
        self.planned: Sequence[Tensor] = ()  # tensors whose numbers the plan determines
        # The gradients that autograd has brought to the output of a call, or to a node.
        self.gradients: Sequence[Tensor | None] = ()
        self.slots: dict[int, tuple[int, Slot]] = {}
        self.place = -1  # of the call whose tensors are here; negative between calls
        self.sources: dict[int, Place] = {}  # where tensors with a slot were found
        self.same: dict[tuple[Place, Place], None] = {}
        self._looked: set[tuple[int, Any]] = set()  # numbers whose other places here are noted
        self.visits = 0
        self.pauses = list[Pause]()  # written when something else begins

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler for seconds, but never uses it here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        return self.run(func, types, args, kwargs or {})

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor; a tensor of the visited call gets one now."""
        if tensor not in self._numbers:
            slot = next(self._slots(tensor), None)
            if slot is None and any(tensor is own for own in self.planned):
                self.program.fixed[self._enter(tensor)] = tensor
            elif slot is not None:
                number = self._enter(tensor)
                self.program.given.append(number)
                is_now = self.node is None or slot.what == "arriving"
                visit = self.visits if is_now else self.before
                self.slots[number] = visit, slot._replace(layout=layout_of(tensor))
                self.sources[number] = Place(self.place, slot.what, slot.key)
                self.note_geometry(number, tensor)
        found = super().number_of(tensor)
        here = self.visits, self.number
        if found in self.sources and (found, here) not in self._looked:
            self._looked.add((found, here))
            source = self.sources[found]
            places = {Place(self.place, slot.what, slot.key) for slot in self._slots(tensor)}
            self.same.update(dict.fromkeys((source, place) for place in places - {source}))
        return found

    def was_seen(self, tensor: Tensor) -> bool:
        """Whether a tensor has been anywhere before."""
        return tensor in self._numbers

    def arrive(self, gradients: Sequence[Tensor | None]) -> None:
        """Note that autograd has arrived somewhere with gradients, which are objects of their own.

        A gradient may be what an operation has made, but a later pass may have another tensor here.
        """
        self.gradients = gradients
        for gradient in gradients:
            if gradient is not None:
                self._numbers.pop(gradient, None)

    def _slots(self, tensor: Tensor) -> Iterator[Slot]:
        """Where a tensor is here; a gradient is nowhere else."""
        if self.node is not None:
            number = self.number
            if number is None:  # the node of a parameter that is used inside a call, too
                return
            for output_nr, gradient in enumerate(self.gradients):
                if tensor is gradient:
                    self.program.steps += self.pauses  # it does not exist at the visit before
                    self.pauses.clear()
                    yield Slot("arriving", (number, output_nr, tensor.shape, tensor.dtype))
                    return
            if isinstance(number, int):
                yield from _saved("between", {self.node: number}, tensor)
            elif self.around is not None:
                yield from _stored(self.around, tensor)
            return
        if self.site is None:
            return
        if tensor is self.gradients[0]:
            yield Slot("gradient")
            return
        call = self.site.call
        found = [] if call.is_released else [*_stored(call.stored, tensor)]
        yield from found
        if not found:  # else the code of the module decides what its nodes have saved
            yield from _saved("inside", {n: k for k, n in enumerate(inside(self.site))}, tensor)


def _stored(stored: Stored, tensor: Tensor) -> Iterator[Slot]:
    """Where a call has stored a tensor."""
    for what, tensors in (("inputs", stored.inputs), ("outputs", stored.outputs)):
        yield from (Slot(what, number) for number, own in enumerate(tensors) if own is tensor)
    yield from (Slot("owned", name) for name, (own, _) in stored.owned.items() if own is tensor)


def _saved(where: str, nodes: Mapping[Node, int], tensor: Tensor) -> Iterator[Slot]:
    """Where nodes have saved a tensor."""
    for node, number in nodes.items():
        for name in names_of(node):
            if is_same(looked_up(node, name), tensor):
                yield Slot(where, (number, name, type(node), tensor.shape))


class Recording(Driver):
    """Lets the engine visit calls, and records what is computed there."""

    def __init__(self, run: BackwardPass, structure: Structure, entry: Entry) -> None:
        self._entry, self._world, self._attributes = entry, world(), attributes_of(structure)
        self._recorder, self._places = _VisitRecorder(), [*structure.sites]
        self._sites, self._forms = [*structure.sites.values()], dict[Number, tuple[Any, ...]]()
        self._parameters = {id(p): number for number, p in enumerate(structure.parameters)}
        self._stores, self._order = list[list[Store]](), list[int]()
        self._turns, self._alike = list[int](), list[tuple[int, ...]]()
        self._drawn, run.sink.noted = states_of_generators(), []
        self._recorder.between = structure.between
        between, schedule = cast("Any", run.between), cast("Any", run.schedule)
        # Functions, because methods of an object that holds this one would be a cycle. Without
        # operations, nothing is crossed.
        self._cross: Any = getattr(type(between), "cross", None)
        self._visit_leaf: Any = getattr(type(between), "visit_leaf", None)
        self._read_inside: Any = getattr(type(between), "read_inside", None)
        schedule.cross, between.visit_leaf = self.cross, self.visit_leaf
        between.read_inside = self.read_inside
        self._delayed = set[int]()  # parameters whose results a replay stores at the next visit
        self._settings = dict[tuple[Number, str], Any]()
        self._crossed = dict[Number, Node]()  # whose settings are to be noted

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """By the engine."""
        recorder = self._recorder
        recorder.planned = getattr(run.survey, "planned_tensors", ())
        self._write_pause()
        grads = laid_apart(grads, recorder.was_seen)
        recorder.site, gradient = site, grads[site.edge.output_nr]
        recorder.place = self._places.index((site.call, site.index))
        recorder.arrive([gradient])
        if gradient is None and not run.is_alone:
            recorder.refusal = "a gradient is undefined"
        if self._turns and turn_of(site) > self._turns[-1] and not run.is_alone:
            recorder.refusal = "calls are visited in another order than autograd's"
        self._turns.append(turn_of(site))
        self._alike.append(alike(site.call))  # before it is released
        drop()  # memory that only this pass could write to
        with seen_by(recorder), recorder:
            self.visit(run, site, grads, others)
            self._note(run, noted_at_visit(run))
        self._note_settings()
        self._order.append(recorder.place)
        recorder.site, recorder.place, recorder.visits = None, -1, recorder.visits + 1

    def cross(self, schedule: Any, node: Node, grads: Sequence[Tensor | None] = ()) -> None:
        """By the engine. A replay crosses a node at the visit before autograd gets there."""
        recorder, site = self._recorder, self._recorder.site
        number, waits = recorder.between.get(node), node in schedule.at_nodes
        if site is None:
            grads = laid_apart(grads, recorder.was_seen)
        if site is not None and node is site.edge.node and number is None:
            # Columns may go through a call with a rule all the same, by the operations inside.
            number = -1 - recorder.place
        if number is None or issubclass(type(node), BackwardCFunction):
            if waits:
                recorder.refusal = "code of the model crosses a node, or a node without a plan"
            self._cross(schedule.between, schedule, node, grads)
            return
        before = len(recorder.program.steps)
        if site is not None:  # the node of the visited output
            self._cross(schedule.between, schedule, node, grads)
        else:
            with self._at(node, number, grads):
                self._cross(schedule.between, schedule, node, grads)
        is_computed = len(recorder.program.steps) > before
        if is_computed or waits:  # a factor of one needs no operation
            self._crossed[number] = node
        if site is None:
            self._note_settings()
        if is_computed and not waits and any(gradient is None for gradient in grads):
            recorder.refusal = "a gradient is undefined"

    def _note_settings(self) -> None:
        """Note what crossed nodes have saved, except for what is in the key of the structure.

        Not while operations are recorded, since numbers are read from tensors.
        """
        for number, node in self._crossed.items():
            names = [name for name in names_of(node) if name not in setting_names(type(node))]
            self._settings.update({(number, name): setting_of(node, name) for name in names})
        self._crossed.clear()

    def visit_leaf(self, run: BackwardPass, node: Node, output_nr: int, grad: Any) -> None:
        """By the engine: visit a parameter that operations use."""
        (grad,) = laid_apart((grad,), self._recorder.was_seen)
        number = self._recorder.between.get(node)
        with self._at(node, number, () if grad is None else (grad,)):
            self._visit_leaf(run.between, run, node, output_nr, grad)
        self._delay(run.sink.noted)

    def read_inside(self, traversal: Any, node: Node, grads: Sequence[Tensor | None]) -> None:
        """By the engine: read parameters inside of a call that was visited before."""
        (_, view, *_), *_ = traversal.inside[node]
        place = self._places.index((view.call, view.index))
        site = self._sites[place]
        number = place, inside(site).index(node)
        self._forms[number] = form_inside(site, number[1])
        self._crossed[number] = node
        apart = laid_apart(grads, self._recorder.was_seen)
        with self._at(node, number, apart):
            self._recorder.place, self._recorder.around = place, view.stored
            self._recorder.before = self._order.index(place)
            self._read_inside(traversal, node, self._recorder.gradients)
        self._note_settings()
        self._delay(traversal.sink.noted)

    def _delay(self, noted: Sequence[Result] | None) -> None:
        """Note the parameters of results that a replay stores at the next visit."""
        own = [parameter for _, parameter, _ in noted or ()]
        self._delayed.update(self._parameters.get(id(parameter), -1) for parameter in own)

    @contextmanager
    def _at(
        self, node: Node, number: Number | None, gradients: Sequence[Tensor | None]
    ) -> Iterator[None]:
        """A block that records what is computed at a node."""
        recorder = self._recorder
        recorder.node, recorder.number = node, number
        recorder.before = max(recorder.visits - 1, 0)
        recorder.arrive(gradients)
        with seen_by(recorder), recorder:
            yield
        recorder.node = recorder.number = recorder.around = None
        recorder.place = -1

    def _write_pause(self) -> None:
        self._recorder.program.steps += self._recorder.pauses
        self._recorder.pauses.clear()

    def _note(self, run: BackwardPass, results: list[Result]) -> None:
        """Note what was stored at a visit, or at the end."""
        recorder = self._recorder
        stores, made = list[Store](), list[int | None]()
        extensions = {id(e): number for number, e in enumerate(run.extensions)}
        for extension, parameter, value in results:
            try:
                apart = Apart(value)
            except (HoldsCode, RecursionError):
                recorder.refusal = "a result holds code"
                return
            if any(tensor.nbytes > LARGEST for tensor in apart.tensors):
                recorder.refusal = "results are so large that replays would save no time"
                return
            who, number = extensions.get(id(extension)), self._parameters.get(id(parameter))
            if who is None or number is None:
                recorder.refusal = "a result is not stored on a parameter of the structure"
                return
            count = -1 if isinstance(value, Tensor) else len(apart.tensors)
            stores.append(Store(who, number, apart, count))
            made += [recorder.number_of(tensor) for tensor in apart.tensors]
            apart.tensors.clear()  # keep the form, not the stored tensors
        if recorder.refusal is None:
            pause = Pause("pause", tuple(numbers(made)), recorder.visits)
            recorder.pauses.append(pause)
            recorder.program.outs += numbers(made)
            self._stores.append(stores)

    def end(self, run: BackwardPass) -> None:
        """Write the program, if the pass could be recorded."""
        recorder, entry = self._recorder, self._entry
        program = recorder.program
        self._write_pause()
        if recorder.refusal is None and (run.sink.deferred or run.sink.noted):
            results = noted_at_visit(run)
            with seen_by(recorder), recorder:
                self._note(run, [*results, *finished(run)])
            self._write_pause()
        if recorder.refusal is not None:
            entry.refusal = recorder.refusal
            return
        if states_of_generators() != self._drawn:
            recorder.refusal = "it draws random numbers that are not torch's"
        elif entry.is_alone is not run.is_alone:
            recorder.refusal = "autograd ran in earlier passes but not in this one, or vice versa"
        elif not entry.is_of(run.context.extensions):
            recorder.refusal = "an extension changed its own attributes"
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
            received, visits, last = self._received({n for s in program.steps for n in s.reads})
            code = pausing(program, received)
        except Exception as error:  # the pass itself has finished, and is right
            entry.refusal = f"it could not be written ({type(error).__name__}: {error})"
            return
        sent = {slot.key[:2] for v in (*visits, last) for slot in v.late if slot.what == "between"}
        settings = [(*key, value) for key, value in self._settings.items() if key not in sent]
        slots = [slot for v in (*visits, last) for slot in v.late if slot.what == "arriving"]
        arriving = {slot.key[0]: self._forms.get(slot.key[0], ()) for slot in slots}
        taken = self._world, self._attributes, settings, [*recorder.same], arriving
        delayed = [*self._delayed]
        entry.recorded = Recorded(visits, last, code, *taken, delayed, program.is_random)

    def _received(self, used: set[int]) -> tuple[list[list[int]], list[Visit], Visit]:
        """The tensors that the program uses, by the visit (or the end) that sends them."""
        received, visits = list[list[int]](), list[Visit]()
        stores_ = [*self._stores, []] if len(self._stores) == len(self._order) else self._stores
        seen = zip([*self._order, -1], stores_, [*self._alike, ()], strict=True)
        for number, (place, stores, pattern) in enumerate(seen):
            known = self._recorder.slots.items()
            own = [(n, slot) for n, (at, slot) in known if at == number and n in used]
            own.sort(key=lambda sent: sent[1].is_late)
            received.append([n for n, _ in own])
            stored, late = [[s for _, s in own if s.is_late is it] for it in (False, True)]
            visits.append(Visit(place, stored, late, stores, pattern))
        return received, visits[:-1], visits[-1]
