"""What is known about the visits of a pass: where their tensors are, and what is assumed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack_capture.nested import is_plain
from backpack_capture.saved import (
    form_inside,
    inside,
    is_same,
    layout_of,
    saved_by,
    setting_of,
)
from backpack_core.contract.extension import Extension
from backpack_core.engine.backward import BackwardPass
from backpack_core.record.call import Call, Site
from backpack_core.record.state import MODULE_ATTRIBUTES, OUR_ATTRIBUTES, SHOWN_ATTRIBUTE
from backpack_operations.structure import Structure
from backpack_products.tuning import memory_budget
from backpack_products.values import is_onednn_on

if TYPE_CHECKING:  # what a recording needs is imported with the first one
    from backpack_capture.code import Code
    from backpack_capture.nested import Apart

Result: TypeAlias = tuple[Extension, Tensor, Any]  # with the parameter that stores it
# A tensor of a call, and how often it had been changed in place when it was stored.
Stored: TypeAlias = tuple[Tensor, int]
# A node between calls, by its number in the structure; or one inside of a call, by the place of the
# call and its number in :func:`inside`.
Number: TypeAlias = int | tuple[int, int]
_DEEPEST: Final = 4  # levels of lists and objects to look into


class Slot(NamedTuple):
    """Where a tensor is found at a visit.

    Attributes:
        what: ``"inputs"`` or ``"outputs"`` of the call, ``"owned"`` by the module, the
            ``"gradient"`` at the output, a gradient ``"arriving"`` at a node between calls, or
            saved by a node ``"inside"`` the call or ``"between"`` calls.
        key: Its number or name among these. For a tensor saved by a node, the arguments of
            :func:`saved_by`; the node's number is that in :func:`inside`, or in the structure. For
            a gradient that arrives at a node, the node's :data:`Number`, the number of its output,
            and the shape and dtype.
        layout: How it lies in memory, and its kind.
    """

    what: str
    key: Any = None
    layout: tuple[Any, ...] | None = None

    @property
    def is_late(self) -> bool:
        """Whether the tensor is taken at the visit, and not when the pass begins."""
        return self.what in ("gradient", "arriving", "inside", "between")


class Place(NamedTuple):
    """A slot of a certain call.

    Attributes:
        call: The place of the call in the structure; -1 for a node between calls.
        what: See :class:`Slot`.
        key: See :class:`Slot`.
    """

    call: int
    what: str
    key: Any

    def tensor(self, sites: Sequence[Site], nodes: Sequence[Node]) -> Tensor | None:
        """The tensor that is there in a pass; ``None`` if it is not of the same kind.

        Args:
            sites: The outputs of calls in the structure.
            nodes: The nodes between calls.
        """
        if self.call < 0:
            return saved_by(nodes, *self.key)
        stored = sites[self.call].call.stored
        if self.what == "owned":
            return stored.owned[self.key][0]
        if self.what == "inside":
            return saved_by(inside(sites[self.call]), *self.key)
        number: int = self.key
        return (stored.inputs if self.what == "inputs" else stored.outputs)[number]


class Store(NamedTuple):
    """A result of a visit.

    Attributes:
        extension: Which of the extensions.
        parameter: The number of the parameter in the structure.
        value: The form of the value.
        size: The number of tensors in it; -1 if it is a tensor.
    """

    extension: int
    parameter: int
    value: Apart
    size: int


class Visit(NamedTuple):
    """What is known about a visit.

    Attributes:
        place: The number of the output in the walk.
        stored: The tensors of the call that are sent to the program.
        late: Tensors that are sent after these: those that the visit brings, or that nodes have
            saved.
        stores: Its results.
        alike: Which tensors that the call received are the same; see :func:`alike`.
    """

    place: int
    stored: list[Slot]
    late: list[Slot]
    stores: list[Store]
    alike: tuple[int, ...]


class Recorded(NamedTuple):
    """The visits of a pass.

    Attributes:
        visits: The visits, in their order.
        last: What is sent and stored after them, in the form of a visit.
        code: A generator, which receives the tensors of each visit and yields results.
        world: Other assumptions.
        attributes: Attributes of modules that structures do not know, by the place of a call.
        settings: What nodes have saved beside the tensors that are sent: the number of the node
            between calls, -1 less the place of an output, or the number of a node inside of a call;
            and the name and the value. A number in the code of a model may differ each time, and a
            mask may be left out.
        same: Places that one tensor had. It is sent from the first only, and may be another one at
            the second in a later pass.
        arriving: The nodes whose gradients are sent, each with the :func:`form_inside` of its call
            if it is inside of one.
        delayed: Parameters whose results are stored after their gradients.
        is_random: Whether it draws random numbers.
    """

    visits: list[Visit]
    last: Visit
    code: Code
    world: tuple[Any, ...]
    attributes: dict[int, dict[str, Any]]
    settings: list[tuple[Number, str, Any]]
    same: list[tuple[Place, Place]]
    arriving: dict[Number, tuple[Any, ...]]
    delayed: list[int]
    is_random: bool


class Entry:
    """What is known about passes by one plan, with extensions of some settings.

    Attributes:
        form: The settings.
        is_alone: Whether the passes run without autograd, in our own order.
        is_shown: Whether they have an ``extension_hook`` or an ``observer``, which need a visit at
            every module.
        added: What observers of the passes add to visits.
        passes: How many passes have run.
        uses: How many of them used the recording.
        misses: How many passes in a row could not use it, since something differs.
        renewals: How many recordings were given up for that.
        recorded: The recording, if one was made.
        refusal: Why none will be made; empty otherwise.
    """

    def __init__(
        self, extensions: Sequence[Extension], is_alone: bool, is_shown: bool, added: Hashable
    ) -> None:
        self.is_alone, self.is_shown, self.added = is_alone, is_shown, added
        self.form = [(type(extension), {**vars(extension)}) for extension in extensions]
        self.passes = self.uses = self.misses = self.renewals = 0
        self.recorded: Recorded | None = None
        self.refusal = ""

    def renew(self) -> None:
        """Give the recording up, so that the next pass makes another."""
        self.recorded, self.uses, self.misses = None, 0, 0
        self.renewals += 1

    def is_of(self, extensions: Sequence[Extension]) -> bool:
        """Whether extensions have these settings; never if the settings hold tensors."""
        try:
            return self.form == [(type(extension), vars(extension)) for extension in extensions]
        except RuntimeError:
            return False


def attributes_of(structure: Structure) -> dict[int, dict[str, Any]]:
    """Other attributes of modules than settings, by the place of a call; most have none.

    Raises:
        Opaque: An attribute cannot be compared.
    """
    found = dict[int, dict[str, Any]]()
    for place, (call, _) in enumerate(structure.sites):
        table = call.module.__dict__
        known = {*MODULE_ATTRIBUTES, *OUR_ATTRIBUTES, *call.settings.names, "training"}
        known |= table.get(SHOWN_ATTRIBUTE, set())
        if others := table.keys() - known:
            found[place] = {name: seen(table[name]) for name in others}
    return found


class Opaque(Exception):
    """An attribute cannot be compared."""


def seen(value: Any, depth: int = 0) -> Any:
    """An attribute in a form that can be compared, and that does not keep it alive.

    Tensors, functions and classes are compared by identity; other objects, such as configurations,
    by their attributes.

    Raises:
        Opaque: It holds an object, and changes of that object cannot be seen.
    """
    if is_plain(value):
        return value
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return [seen(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < _DEEPEST:
        return {key: seen(item, depth + 1) for key, item in value.items()}
    whole = value() if isinstance(value, ref) else value
    if isinstance(whole, (Tensor, FunctionType, BuiltinFunctionType, type)):
        return type(whole).__name__, id(whole)
    own = getattr(whole, "__dict__", None)
    # A callable, such as a method or functools.partial, has more than its attributes.
    if own is None or callable(whole) or depth >= _DEEPEST:
        raise Opaque
    return id(type(whole)), {name: seen(item, depth + 1) for name, item in own.items()}


def world() -> tuple[Any, ...]:
    """What else decides which operations run, apart from modules, extensions and shapes."""
    kernels = torch.are_deterministic_algorithms_enabled(), is_onednn_on()
    return memory_budget(), torch.get_num_threads(), torch.get_default_dtype(), kernels


def given_to(recorded: Recorded, structure: Structure, is_alone: bool) -> list[list[Stored]] | None:
    """What calls have stored for each visit; ``None`` if an assumption no longer holds.

    The memory layout of the tensors of calls is part of the structure.
    """
    if recorded.world != world():
        return None
    sites, nodes, before = [*structure.sites.values()], [*structure.between], inf
    for place, attributes in recorded.attributes.items():
        if not are_alike(sites[place].call.module.__dict__, attributes):
            return None
    for number in recorded.delayed:
        own: Any = structure.parameters[number]
        if own._backward_hooks or own._post_accumulate_grad_hooks:  # they may look at results
            return None
    for at, form in recorded.arriving.items():
        if form and isinstance(at, tuple) and form_inside(sites[at[0]], at[1]) != form:
            return None
    for at, name, value in recorded.settings:
        if setting_of(node_of(at, sites, nodes), name) != value:
            return None
    for first, second in recorded.same:
        one, other = first.tensor(sites, nodes), second.tensor(sites, nodes)
        if one is None or not (one is other or is_same(other, one)):
            return None
    found = list[list[Stored]]()
    for place, stored, late, _, pattern in recorded.visits:
        site = sites[place]
        call, turn = site.call, turn_of(site)
        if (turn > before and not is_alone) or (pattern and pattern != alike(call)):
            return None
        own, before = call.stored, turn
        if not are_saved(late, nodes, site):
            return None
        given = list[Stored]()
        for what, key, _ in stored:
            if what == "owned":
                given.append(own.owned[key])
            elif what == "inputs":
                given.append((own.inputs[key], own.versions[key]))
            else:
                given.append((own.outputs[key], own.versions[len(own.inputs) + key]))
        found.append(given)
    return found if are_saved(recorded.last.late, nodes) else None


def node_of(number: Number, sites: Sequence[Site], nodes: Sequence[Node]) -> Node:
    """The node with a number, which may be that of an output if it is negative."""
    if isinstance(number, tuple):
        return inside(sites[number[0]])[number[1]]
    return nodes[number] if number >= 0 else sites[-1 - number].edge.node


def are_saved(late: list[Slot], nodes: list[Node], site: Site | None = None) -> bool:
    """Whether nodes hold what a visit (or the end) takes, in the same form."""
    for what, key, layout in late:
        if what not in ("gradient", "arriving"):
            own = nodes if what == "between" or site is None else inside(site)
            saved = saved_by(own, *key)
            if saved is None or layout_of(saved) != layout:
                return False
    return True


def are_alike(table: dict[str, Any], attributes: dict[str, Any]) -> bool:
    """Whether attributes of a module are what they were."""
    try:
        return all(seen(table.get(name)) == value for name, value in attributes.items())
    except Opaque:
        return False


def turn_of(site: Site) -> int:
    """The turn of an output: autograd visits the largest number first, which was computed last."""
    node: Any = site.edge.node
    number: int = node._sequence_nr()
    return number


def alike(call: Call) -> tuple[int, ...]:
    """For each tensor that a call received, the number of the first that is the same object."""
    inputs = call.stored.inputs
    known = [id(tensor) for tensor in inputs]
    return tuple(map(known.index, known)) if len(known) > 1 else ()


def noted_at_visit(run: BackwardPass) -> list[Result]:
    """What was stored at a visit, without values that wait for the end."""
    noted, run.sink.noted = run.sink.noted or [], []
    return [result for result in noted if not result[0].is_deferred]


def finished(run: BackwardPass) -> list[Result]:
    """Let extensions compute the results that waited for the end, and store them."""
    values = run.sink.finished()
    run.sink.deferred.clear()
    found = [(e, parameter, value) for e, of in values for parameter, value in of.items()]
    for extension, parameter, value in found:
        setattr(parameter, extension.savefield, value)
    return found
