"""Repeats what rules and extensions compute at visits, without calling them.

In a pass that goes by a plan, the same operations of torch run as in those before it. So they are
written down once, visit by visit, and later passes run them alone. Autograd's pass, its hooks, and
the time at which results are there stay what they are. A recording is compared with the engine at
its 1st, 2nd, 4th, 8th, … use.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_capture._torch import (
    generator_states,
    is_ordinary,
    keys_of,
    set_generator_states,
)
from backpack_capture.code import Code, pausing
from backpack_capture.graph import difference_of
from backpack_capture.nested import Apart, HoldsCode, is_plain
from backpack_capture.program import Operation, Pause, numbers
from backpack_capture.recorder import Recorder
from backpack_capture.tidying import tidy
from backpack_capture.unseen import seen_by, states_of_generators
from backpack_capture.views import with_direct_views
from backpack_core import memory_budget
from backpack_core.contract.bases import only_computes
from backpack_core.contract.observer import Driver, Observer
from backpack_core.contract.operation import Operation as Asked
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.losses import changed_gradient
from backpack_core.errors import InternalError, OverwrittenInputError, PluginCodeError
from backpack_core.plan.plan import Planned
from backpack_core.plan.structure import Structure
from backpack_core.record.call import Call, Site
from backpack_core.record.state import own_attributes

WIDEST: Final = 2**22  # bytes of a tensor; beyond, kernels take much longer than what calls them
FIRST: Final = 2  # which pass by a plan is written down
MOST: Final = 4  # settings of extensions for which there are recordings of one plan
_ONE = (Tensor, Parameter)


class Slot(NamedTuple):
    """Where a tensor is found at a visit.

    Attributes:
        what: ``"inputs"`` or ``"outputs"`` of the call, ``"owned"`` by the module, ``"saved"`` by
            the node of the output, or the ``"gradient"`` there.
        key: Its number or name among these.
    """

    what: str
    key: Any = None

    def of(self, call: Call) -> Tensor:
        """The tensor, if the call has it."""
        stored = call.stored
        if self.what == "owned":
            return stored.owned[self.key][0]
        found: Tensor = getattr(stored, self.what)[self.key]
        return found


class Store(NamedTuple):
    """A result of a visit.

    Attributes:
        extension: Which of the extensions.
        parameter: The number of the parameter in the structure.
        value: What it is made of.
        size: The number of tensors in it; -1 if it is a tensor.
    """

    extension: int
    parameter: int
    value: Apart
    size: int


class Visit(NamedTuple):
    """What is known of a visit.

    Attributes:
        place: The number of the output in the walk.
        slots: The tensors that are sent to the program.
        layouts: How each of them lies in memory, and what it is.
        stores: Its results.
    """

    place: int
    slots: list[Slot]
    layouts: list[tuple[Any, ...]]
    stores: list[Store]


class Recorded(NamedTuple):
    """The visits of a pass.

    Attributes:
        visits: The visits, in their order.
        code: A generator, which is sent the tensors of each, and yields results.
        world: What else it takes for granted.
        attributes: Those of modules that no structure knows.
        is_random: Whether it draws random numbers.
    """

    visits: list[Visit]
    code: Code
    world: tuple[Any, ...]
    attributes: list[dict[str, Any]]
    is_random: bool


class Entry:
    """What is known of passes by one plan, with extensions of some settings.

    Attributes:
        form: The settings.
        passes: How many there were.
        uses: How many of them used the recording.
        recorded: The recording, once there is one.
        refusal: Why there will be none; empty otherwise.
    """

    def __init__(self, form: Any) -> None:
        self.form = form
        self.passes = self.uses = 0
        self.recorded: Recorded | None = None
        self.refusal = ""


class Visits(Observer):
    """Drives passes by recordings, or makes them."""

    def drive(self, run: Any, planned: Planned, structure: Structure) -> Driver | None:
        """By a recording that holds; one that makes it; or ``None``."""
        if not _may_repeat(run):
            return None
        entry = _entry(planned, run.context.extensions)
        if entry is None or entry.refusal:
            return None
        entry.passes += 1
        if entry.passes < FIRST:
            return None
        if entry.recorded is None:
            return Recording(run, structure, entry) if _may_record(entry, run, structure) else None
        given = _given(entry.recorded, structure)
        if given is None:
            return None
        entry.uses += 1
        is_compared = entry.uses & (entry.uses - 1) == 0
        kind = Compared if is_compared else Repeated
        run.context.history["repeated a recording"] += not is_compared
        return kind(entry, run, structure, given)


def _may_repeat(run: BackwardPass) -> bool:
    """Whether a pass is one of those in which only rules and extensions do anything at visits."""
    context, options = run.context, run.options
    return not (
        context.extension_hook is not None
        or context.observer is not None
        or context.debug
        or context.gradient != "autograd"
        or context.whole
        or not run.is_outermost
        or options.get("inputs") is not None
        or options.get("create_graph")
        or any(e.is_deferred or e.needs_normalisers or e.keeps_graph for e in context.extensions)
        or any(group.has_overrides for group in run.groups)
        or not is_ordinary()
    )


def _entry(planned: Planned, extensions: Sequence[Any]) -> Entry | None:
    known: list[Entry] = planned.kept.setdefault(Visits, [])
    form = [(type(extension), vars(extension)) for extension in extensions]
    try:
        found = next((entry for entry in known if entry.form == form), None)
    except RuntimeError:  # there are tensors among the settings
        return None
    if found is None and len(known) < MOST:
        found = Entry([(kind, dict(table)) for kind, table in form])
        known.append(found)
    return found


def _may_record(entry: Entry, run: BackwardPass, structure: Structure) -> bool:
    """Whether whatever computes has said that it does nothing else; and whether it pays."""
    parts: list[Any] = [*run.context.extensions, *(e.propagator for e in run.context.extensions)]
    parts += [call.rule for call, _ in structure.sites]
    foreign = [type(part).__name__ for part in parts if not only_computes(type(part))]
    settings = [
        (type(e).__name__, n, v) for e in run.context.extensions for n, v in vars(e).items()
    ]
    open_ = [f"{kind}.{name}" for kind, name, value in settings if not _is_setting(value)]
    tensors = [t for c, _ in structure.sites for t in (*c.stored.inputs, *c.stored.outputs)]
    if foreign:
        entry.refusal = f"{foreign[0]} may do more than compute"
    elif open_:
        entry.refusal = f"nobody would notice if {open_[0]} were changed"
    elif max(t.nbytes for t in tensors) > WIDEST:
        entry.refusal = "kernels take longer than what calls them"
    elif not all(map(_is_settled, _attributes(structure))):
        entry.refusal = "a module has an attribute that cannot be compared"
    return not entry.refusal


def _is_setting(value: Any) -> bool:
    """Whether a setting of an extension cannot be changed but by another one in its place."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_setting, value))
    return is_plain(value) or isinstance(value, (Propagator, Asked)) or value == {}


def _is_settled(attributes: dict[str, Any]) -> bool:
    """Whether attributes are numbers and words, or lists of them."""
    return all(
        is_plain(value) or (isinstance(value, (list, tuple)) and all(map(is_plain, value)))
        for value in attributes.values()
    )


def _attributes(structure: Structure) -> list[dict[str, Any]]:
    return [own_attributes(call.module, call.settings) for call, _ in structure.sites]


def _world() -> tuple[Any, ...]:
    """What decides which operations run, besides modules, extensions and shapes."""
    is_strict = torch.are_deterministic_algorithms_enabled()
    return memory_budget(), torch.get_num_threads(), torch.get_default_dtype(), is_strict


def _given(recorded: Recorded, structure: Structure) -> list[list[Tensor | None]] | None:
    """The tensors for each visit, but gradients; ``None`` if something is another thing now."""
    if recorded.world != _world() or recorded.attributes != _attributes(structure):
        return None
    calls, found = [call for call, _ in structure.sites], list[list[Tensor | None]]()
    for place, slots, layouts, _ in recorded.visits:
        call, tensors = calls[place], list[Tensor | None]()
        for slot, layout in zip(slots, layouts, strict=True):
            if slot.what in ("gradient", "saved"):
                tensors.append(None)
                continue
            tensor = slot.of(call)
            if layout != _layout(tensor) or tensor._version != _version(call, slot):
                return None
            tensors.append(tensor)
        found.append(tensors)
    return found


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    is_one = type(tensor) in _ONE
    return is_one, tensor.stride(), keys_of(tensor), tensor.device, tensor.dtype, tensor.shape


def _version(call: Call, slot: Slot) -> int:
    """How often a tensor had been changed in place when it was stored."""
    stored = call.stored
    if slot.what == "owned":
        return stored.owned[slot.key][1]
    first = len(stored.inputs) if slot.what == "outputs" else 0
    return stored.versions[first + int(slot.key)]


class _VisitRecorder(Recorder):
    """Writes down a pass, and where tensors were found that no operation had made."""

    def __init__(self) -> None:
        super().__init__((), (), lambda tensor: False)
        self.site: Site | None = None
        self.gradient: Tensor | None = None
        self.slots: dict[int, tuple[int, Slot, tuple[Any, ...]]] = {}
        self.visits = 0

    def number_of(self, tensor: Tensor) -> int | None:
        """The number; of one that the visited call has, from now on."""
        if tensor not in self._numbers:
            slot = self._slot(tensor)
            if slot is not None:
                number = self._enter(tensor)
                self.program.given.append(number)
                self.slots[number] = self.visits, slot, _layout(tensor)
                self.note_geometry(number, tensor)
        return super().number_of(tensor)

    def _slot(self, tensor: Tensor) -> Slot | None:
        if self.site is None:
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
            if _is_same(getattr(node, name), tensor):
                return Slot("saved", name)
        return None


def _is_same(saved: Any, tensor: Tensor) -> bool:
    if not isinstance(saved, Tensor) or _layout(saved) != _layout(tensor):
        return False
    is_there = saved.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return is_there and saved.storage_offset() == tensor.storage_offset()


class Recording(Driver):
    """Has the engine visit calls, and writes down what is computed there."""

    is_alone = False

    def __init__(self, run: BackwardPass, structure: Structure, entry: Entry) -> None:
        self._entry, self._world, self._attributes = entry, _world(), _attributes(structure)
        self._recorder, self._places = _VisitRecorder(), [*structure.sites]
        self._extensions = {id(e): number for number, e in enumerate(run.context.extensions)}
        self._parameters = {id(p): number for number, p in enumerate(structure.parameters)}
        self._stores, self._order = list[list[Store]](), list[int]()
        self._drawn, run.sink.noted = states_of_generators(), []

    def wants(self, call: Call, index: int) -> bool:
        """The engine decides."""
        raise NotImplementedError

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """By the engine."""
        recorder = self._recorder
        recorder.site, recorder.gradient = site, grads[site.edge.output_nr]
        if recorder.gradient is None:
            recorder.refusal = "a gradient is undefined"
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
            number = self._parameters.get(id(parameter))
            if number is None or extension.is_deferred:
                recorder.refusal = "a result is not stored on a parameter of the structure"
                return
            count = -1 if isinstance(value, Tensor) else len(apart.tensors)
            stores.append(Store(self._extensions[id(extension)], number, apart, count))
            made += [recorder.number_of(tensor) for tensor in apart.tensors]
        run.sink.noted = []
        if recorder.refusal is None:
            pause = Pause("pause", tuple(numbers(made)), recorder.visits)
            recorder.program.steps.append(pause)
            recorder.program.outs += numbers(made)
            self._stores.append(stores)

    def end(self, run: BackwardPass) -> None:
        """Write the program, if one could be written down."""
        recorder, entry = self._recorder, self._entry
        is_known = recorder.refusal is not None or states_of_generators() == self._drawn
        program = recorder.program
        if not is_known:
            recorder.refusal = "it draws random numbers that are not torch's"
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
        world = self._world, self._attributes, program.is_random
        entry.recorded = Recorded(visits, code, *world)

    def _received(self, used: set[int]) -> tuple[list[list[int]], list[Visit]]:
        """What is sent at each visit, of what is used."""
        received, visits = list[list[int]](), list[Visit]()
        for number, (place, stores) in enumerate(zip(self._order, self._stores, strict=True)):
            own = {n: s for n, s in self._recorder.slots.items() if s[0] == number and n in used}
            received.append([*own])
            slots, layouts = [slot for _, slot, _ in own.values()], [how for *_, how in own.values()]
            visits.append(Visit(place, slots, layouts, stores))
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
        self._program: Generator[Any, Any, None] = entry.recorded.code.run()  # type: ignore[assignment]
        next(self._program)

    def wants(self, call: Call, index: int) -> bool:
        """What was visited when it was recorded."""
        return (call, index) in self._order

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """Run what was computed at this visit, and store what was stored."""
        if others is not None and run.is_curvature:
            raise changed_gradient(run.view(site, grads[site.edge.output_nr]), others)
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
            elif given[place]._version != _version(call, slot):  # type: ignore[union-attr]
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

    is_alone = False

    def __init__(self, entry: Entry, *what: Any) -> None:
        super().__init__(entry, *what)
        run: BackwardPass = what[0]
        run.sink.noted = []

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
                f"{site.call.path}: the plugin {who} has said by only_computes() that the same "
                "operations serve every pass of one structure, and computed something else than "
                f"before. {self._entry.uses} passes may be wrong. Take only_computes() out of the "
                'plugin, or write check="always".'
            )


def _laid_out(grad: Tensor | None, output: Tensor, layout: tuple[Any, ...]) -> Tensor:
    """A gradient, as the recorded one lay in memory."""
    grad = torch.zeros_like(output) if grad is None else grad
    if _layout(grad) == layout:
        return grad
    _, stride, _, device, dtype, shape = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(grad)
