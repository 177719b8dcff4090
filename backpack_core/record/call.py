"""A call: one forward execution of one module, and its place in the autograd graph.

The graph owns a call: it lies in the metadata of the node that made the output, and dies with that
node. A call must not hold the node of its own output, which would be a cycle. It holds its inputs,
whose nodes are ancestors, and detached outputs. A call does not change, but :meth:`Call.release`
drops its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node, class_of
from backpack_core.errors import ReleasedIOError
from backpack_core.record.owner import PATH_ATTRIBUTE
from backpack_core.record.run import NO_RUN, Run
from backpack_core.record.state import Settings

SITES: Final = "backpack_core.sites"
VIEWED: Final = "backpack_core.viewed"


class Edge(NamedTuple):
    """An output of an autograd node, as the address that a quantity is sent to.

    Attributes:
        node: The node.
        output_nr: Which of its outputs.
        level: Which call is meant, if calls returned views of the output that were overwritten:
            zero as seen from outside of all; ``n > 0`` for the ``n``-th such call from the inside;
            ``INNER`` below those; ``INSIDE`` below the call that returned the output itself.
    """

    node: Node
    output_nr: int
    level: int = 0


class Layout(NamedTuple):
    """How a view lies in the memory of the tensor that it is a view of (its base)."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    base_size: torch.Size
    base_stride: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the view shows every number of its base."""
        return self.size.numel() == self.base_size.numel()


NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Stored(NamedTuple):
    """The tensors of a call.

    Attributes:
        args: Positional arguments, as passed.
        kwargs: Keyword arguments, in the order in which ``forward`` declares them.
        inputs: Every tensor among the arguments, positional ones first.
        outputs: Every tensor in the return value, detached.
        versions: How often each input and output had been changed in place when it was stored.
        owned: Parameters and buffers of the module by name, each with its version; also those of
            modules inside, if the module may have to be run again.
        parameters: Which of them are parameters.
        computed: For each parameter that the module computed (by a parametrization), the leaves
            that it was computed from.
        saved: What hooks on saved tensors took, by slot (inputs first); ``None`` for what they
            left. At these slots, the tensors above are stand-ins with a shape and no numbers. Empty
            without such hooks.
        frozen: Which of those that are owned needed no gradient in this call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    versions: tuple[int, ...]
    owned: dict[str, tuple[Tensor, int]]
    parameters: tuple[str, ...]
    computed: Mapping[str, tuple[Tensor, ...]] = NOTHING
    saved: tuple[Any, ...] = ()
    frozen: Sequence[str] = ()


def to_stored(noted: Any) -> Stored:
    """Make the stored form of a call from what its hook noted, which had to be quick."""
    args, kwargs, inputs, outputs, received, counts, owned, parameters, computed, frozen = noted
    versions = (*received, *counts[: len(outputs)])
    if not owned:
        return Stored(args, kwargs, inputs, outputs, versions, {}, (), computed, (), frozen)
    if isinstance(parameters, int):  # so many of those that are owned
        parameters = tuple(owned)[:parameters]
    count = iter(counts[len(outputs) :])
    there = {name: (tensor, next(count)) for name, tensor in owned.items() if tensor is not None}
    kept = parameters if len(there) == len(owned) else tuple([n for n in parameters if n in there])
    return Stored(args, kwargs, inputs, outputs, versions, there, kept, computed, (), frozen)


_ALIVE: Final = object()  # every call holds it


def live_calls() -> int:
    """The number of calls alive in this process: zero once every graph is gone."""
    return getrefcount(_ALIVE) - _OTHERS


_OTHERS: Final = getrefcount(_ALIVE)


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Call:
    """What a module received and returned in one forward execution.

    Attributes:
        module: The module.
        noted: The stored form, or what it is made from when it is first asked for.
        rule: The layer rule that speaks for the module; a stand-in where there is none.
        provenance: Who provided the rule.
        edges: Where each input came from, as of before the forward; ``None`` for constants and
            leaves.
        thread: The thread that ran the forward pass.
        training: Whether the module was in train mode then.
        settings: Names and values of the module's plain attributes (``eps``, ``p``, ``stride``).
        is_rewired: The module changed a *view* in place, so that autograd rewrote the graph behind
            its input: the edges lead nowhere, and only the output's own node knows the way.
        is_readable: What autograd saved may be read by others: no hooks stand before it, as in a
            checkpoint, which gives every tensor once.
        unpacks_twice: Or those of a checkpoint that gives them to us, and to autograd once more.
        run: What the model received, if it ran as a whole.
        stored: The tensors; once they are freed, asking for them raises.
        is_released: Whether they were freed.
    """

    module: Module
    rule: Any  # a LayerRule; importing that would be a cycle
    provenance: Any
    edges: tuple[Edge | None, ...]
    noted: Any
    thread: int
    training: bool
    settings: Settings
    run: Run = NO_RUN
    is_rewired: bool = False
    is_readable: bool = True
    unpacks_twice: bool = True
    is_released: bool = False
    stored: Stored = field(init=False)
    _alive: object = _ALIVE

    @property
    def goes_inside(self) -> bool:
        """Whether a quantity goes on through the nodes inside, and not by the rule."""
        return self.is_rewired or bool(self.rule.transparent)

    def release(self) -> None:
        """Free the tensors; any later use raises :class:`ReleasedIOError`."""
        if not self.is_released:
            if self.noted is None:
                del self.stored
            self.noted, self.is_released = None, True

    def __getattr__(self, name: str) -> Any:
        # Python asks this for missing attributes only, so existing ones cost nothing.
        if name != "stored":
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        noted = self.noted
        if noted is not None:
            self.stored = noted if isinstance(noted, Stored) else to_stored(noted)
            self.noted = None
            return self.stored
        raise ReleasedIOError(
            f"{self.path}: the inputs and outputs of this forward pass were freed by an earlier "
            "backward pass. Pass retain_graph=True to backward() in every backward pass but the "
            "last."
        )

    @property
    def path(self) -> str:
        """The module's path in the extended model, for messages."""
        return path_of(self.module)

    @property
    def receives_input(self) -> int:
        """Whether it received the model's input, or a view of it: 2 if samples are first there."""
        return self.run.receives(self.stored.inputs)

    def __repr__(self) -> str:
        """The module and the shapes."""
        if self.is_released:
            return f"<call of {self.path}, released>"
        received = [list(t.shape) for t in self.stored.inputs]
        returned = [list(t.shape) for t in self.stored.outputs]
        return f"<call of {self.path}: {received} -> {returned}>"


CallCaches = dict[Call, dict[Any, Any]]  # what was computed of calls, for all columns


def path_of(module: Module) -> str:
    """A module's class and its path in the extended model."""
    path = module.__dict__.get(PATH_ATTRIBUTE)
    name = class_of(module).__name__
    return f"{name} '{path}'" if path else name


class Site(NamedTuple):
    """One output of a call, with its place in the graph: where the call is visited.

    Attributes:
        call: The call.
        index: Which of its outputs.
        edge: Its place in the graph.
        layout: How the output lies in the tensor at the edge, if it is a view that was overwritten
            in place; ``None`` if it is that tensor.
    """

    call: Call
    index: int  # type: ignore[assignment] # a tuple has a method of that name
    edge: Edge
    layout: Layout | None = None


INNER: Final = -1
INSIDE: Final = -2


def edge_of(tensor: Tensor) -> Edge | None:
    """The edge of a tensor; ``None`` for a leaf or a constant, behind which there is no graph."""
    node = tensor.grad_fn
    # Much faster than Edge(...).
    return None if node is None else tuple.__new__(Edge, (node, tensor.output_nr, 0))


def record_at_base(call: Call, index: int, output: Tensor, base: Tensor) -> None:
    """Record a call also at the tensor that its output is a view of; see :func:`viewed_at`."""
    if output.dtype != base.dtype:
        return  # parts of complex numbers: the operations know the way
    offset = int(output.storage_offset() - base.storage_offset())
    layout = Layout(output.shape, output.stride(), offset, base.shape, base.stride())
    node: Any = base.grad_fn
    table = node.metadata.setdefault(VIEWED, {})
    table.setdefault(base.output_nr, []).append((call, index, layout))


def has_call(node: Node) -> bool:
    """Whether a call is recorded at an output of a node, or at a view of one."""
    noted: Any = node.metadata
    return SITES in noted or VIEWED in noted


def site_at(edge: Edge) -> Site | None:
    """The site at an edge; ``None`` if the edge leads to a node between calls."""
    node, output_nr, level = edge
    if level > 0:
        call, index, layout = viewed_at(node, output_nr)[level - 1]
        return Site(call, index, edge, layout)
    table = None if level == INSIDE else node.metadata.get(SITES)  # type: ignore[attr-defined]
    found = None if table is None else table.get(output_nr)
    # Much faster than Site(...).
    return None if found is None else tuple.__new__(Site, (*found, edge, None))


def viewed_at(node: Node, output_nr: int) -> list[tuple[Call, int, Layout]]:
    """Calls that returned views of an output, the innermost first.

    If a module returns a view (``Linear`` of three axes does), and the view is changed in place
    afterwards, autograd drops the view's own node from the graph, or leads some users past it. The
    gradient of what the module returned is then found at the base.
    """
    table: Any = node.metadata.get(VIEWED)  # type: ignore[attr-defined]
    found: list[tuple[Call, int, Layout]] = [] if table is None else table.get(output_nr, [])
    return found
