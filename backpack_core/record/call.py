"""A call: one forward execution of one module, and its place in the autograd graph.

The graph owns the call. It is stored in the metadata of the autograd node that made the output, and
is freed with that node. So a call must not refer to the node of its own output, which would be a
reference cycle: it stores its outputs detached. Inputs keep their nodes, which are ancestors of the
output. A call is immutable, except that :meth:`Call.release` frees its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node, class_of
from backpack_core.errors import ReleasedIOError
from backpack_core.record.models import NO_RUN, PATH_ATTRIBUTE, Run
from backpack_core.record.state import Settings

# Keys in the metadata of autograd nodes: calls by output; and what a library notes about views of
# an output: call, index, and layout.
SITES: Final = "backpack_core.sites"
VIEWED: Final = "backpack_core.viewed"


class Edge(NamedTuple):
    """An output of an autograd node: the address that quantities are sent to.

    Attributes:
        node: The node.
        output_nr: The index of the output.
        level: Which call is addressed, if a library has recorded several at one output. Zero is the
            one that all users of the output see.
    """

    node: Node
    output_nr: int
    level: int = 0


NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(slots=True, eq=False, repr=False)
class Stored:
    """The tensors of a call, as the forward hook left them.

    Attributes:
        args: Positional arguments, as passed.
        kwargs: Keyword arguments, in the order in which ``forward`` declares them.
        inputs: Every tensor among the arguments, positional ones first.
        outputs: Every tensor in the return value, detached.
        versions: The version counters of inputs, outputs, and ``tensors``, when they were stored.
        tensors: Parameters and buffers of the module by name; ``None`` for one that it lacks. If
            the module may have to be run again, those of its submodules are included.
        named: The names in ``tensors`` that are parameters; or their number, if they come first.
        computed: For each parameter that the module computes (by a parametrization), the leaf
            tensors that it is computed from.
        frozen: The names in ``tensors`` that required no gradient.
        saved: What saved-tensor hooks packed, by slot (inputs first), with ``None`` for tensors
            that they left alone. In these slots, the tensors above are stand-ins that have a shape
            and no values. Empty if there are no such hooks.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    versions: Sequence[int]
    tensors: Mapping[str, Tensor | None]
    named: int | tuple[str, ...]
    computed: Mapping[str, tuple[Tensor, ...]] = field(default_factory=lambda: NOTHING)
    frozen: Sequence[str] = ()
    saved: tuple[Any, ...] = ()
    _owned: dict[str, tuple[Tensor, int]] | None = field(default=None, init=False)

    @property
    def owned(self) -> dict[str, tuple[Tensor, int]]:
        """The parameters and buffers that are there, by name, each with its version counter."""
        if self._owned is None:
            present = [(name, t) for name, t in self.tensors.items() if t is not None]
            counts = self.versions[len(self.inputs) + len(self.outputs) :]
            self._owned = {n: (t, v) for (n, t), v in zip(present, counts, strict=True)}
        return self._owned

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are there."""
        named, tensors = self.named, self.tensors
        names = tuple(tensors)[:named] if isinstance(named, int) else named
        return tuple([name for name in names if tensors[name] is not None])


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Call:
    """One forward execution of a module: what it received and returned.

    Attributes:
        module: The module.
        rule: The layer rule of the module; a ``NoRule`` if there is none.
        provenance: The plugin that provided the rule.
        edges: The edge of each input before the forward ran; ``None`` for constants and leaves.
        thread: The thread that ran the forward pass.
        training: Whether the module was in train mode.
        settings: Names and values of the module's plain attributes (``eps``, ``p``, ``stride``).
        run: What the extended model received in this forward pass.
        is_rewired: Whether the module changed a *view* in place. Autograd then rewrites the graph
            behind the input, so that ``edges`` are stale, and quantities must go through the
            output's own node.
        is_readable: Whether the tensors that autograd saved may be read. They may not if
            saved-tensor hooks are active, such as those of a checkpoint, which hands out each
            tensor once.
        unpacks_twice: Whether these hooks can unpack a tensor for us and once more for autograd.
        stored: The tensors. Raises :class:`ReleasedIOError` once they are freed.
        is_released: Whether they were freed.
    """

    module: Module
    rule: Any  # a LayerRule; importing that would be a cycle
    provenance: Any
    edges: tuple[Edge | None, ...]
    stored: Stored
    thread: int
    training: bool
    settings: Settings
    run: Run = NO_RUN
    is_rewired: bool = False
    is_readable: bool = True
    unpacks_twice: bool = True
    is_released: bool = False

    @property
    def goes_inside(self) -> bool:
        """Whether quantities go through the autograd nodes inside the module, not by the rule."""
        return self.is_rewired or bool(self.rule.transparent)

    def release(self) -> None:
        """Free the tensors; asking for them later raises :class:`ReleasedIOError`."""
        if not self.is_released:
            del self.stored
            self.is_released = True

    def __getattr__(self, name: str) -> Any:
        # Python calls this for missing attributes only, so access to existing ones costs nothing.
        if name != "stored":
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
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
        """Whether an input shares memory with the model's: 1, or 2 if axis 0 holds the samples."""
        return self.run.receives(self.stored.inputs)

    def __repr__(self) -> str:
        """The module, and the shapes of its inputs and outputs."""
        if self.is_released:
            return f"<call of {self.path}, released>"
        received = [list(t.shape) for t in self.stored.inputs]
        returned = [list(t.shape) for t in self.stored.outputs]
        return f"<call of {self.path}: {received} -> {returned}>"


# By call, values that depend on the call alone, and so serve all columns; see ``View.call_cache``.
CallCaches = dict[Call, dict[Any, Any]]


def path_of(module: Module) -> str:
    """The class name of a module, and its path in the extended model."""
    path = module.__dict__.get(PATH_ATTRIBUTE)
    name = class_of(module).__name__
    return f"{name} '{path}'" if path else name


class Site(NamedTuple):
    """One output of a call, and where it lies in the graph: calls are visited at their sites.

    Attributes:
        call: The call.
        index: The index of the output.
        edge: The edge of the output.
        layout: How the output lies in the tensor at the edge, as a library describes it; ``None``
            if it is that tensor.
    """

    call: Call
    index: int  # type: ignore[assignment] # a tuple has a method of that name
    edge: Edge
    layout: Any = None


def edge_of(tensor: Tensor) -> Edge | None:
    """The edge of a tensor; ``None`` for a leaf or a constant, which has no graph."""
    node = tensor.grad_fn
    # Much faster than Edge(...).
    return None if node is None else tuple.__new__(Edge, (node, tensor.output_nr, 0))


def has_call(node: Node) -> bool:
    """Whether a call is recorded at an output of a node."""
    metadata: Any = node.metadata
    return SITES in metadata


def site_at(edge: Edge) -> Site | None:
    """The site at an edge; ``None`` if no call is recorded there."""
    table: Any = edge.node.metadata.get(SITES)  # type: ignore[attr-defined]
    entry = None if table is None else table.get(edge.output_nr)
    # Much faster than Site(...).
    return None if entry is None else tuple.__new__(Site, (*entry, edge, None))
