"""One forward execution of one module. Imports torch and ``errors`` only.

A :class:`ModuleCall` is owned by the autograd graph: it lies in the metadata of the node that made
the output, and dies with it. A call never holds the node of its own output (that would be a cycle);
it holds its inputs, whose nodes are ancestors, and a detached output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import OverwrittenInputError, ReleasedIOError, UsageError

T = TypeVar("T")

METADATA_KEY = "backpack_core.calls"
PATH_ATTRIBUTE = "_backpack_path"

Node = torch.autograd.graph.Node


class Edge(NamedTuple):
    """A tensor as the autograd graph sees it, at one moment of the forward pass.

    Attributes:
        node: The node that made the tensor; ``None`` where it is the node of the call's own output
            (the module returned its input), because a call must not hold that one.
        output_nr: Which output of the node it is.
        depth: How many calls had already returned this very tensor. A module may return its own
            input, so several calls can share a node; ``depth`` says which of them came before.
    """

    node: Node | None
    output_nr: int
    depth: int


Record = tuple["ModuleCall", int]  # a call, and which of its outputs


class Frame:
    """A module execution that has begun: what only the moment before the forward can tell."""

    __slots__ = ("edges", "module", "parent", "tensors", "training", "versions")

    def __init__(self, module: Module, tensors: tuple[Tensor, ...], parent: Frame | None) -> None:
        self.module = module
        self.training = module.training
        self.parent = parent
        self.tensors = tensors
        self.versions = [t._version for t in tensors]
        self.edges: Sequence[Edge | None] = [edge_of(t) for t in tensors]

    def close(self, edges: Sequence[Edge | None]) -> None:
        """Let go of the tensors; keep where the execution began."""
        self.edges = edges
        self.tensors, self.versions = (), []


def edge_of(tensor: Tensor) -> Edge | None:
    """The gradient edge of a tensor, or ``None`` for a leaf or a constant.

    Leaves need no edge: nothing behind them wants a quantity from us.
    """
    node = tensor.grad_fn
    if node is None:
        return None
    return Edge(node, tensor.output_nr, len(records_at(node, tensor.output_nr)))


def records_at(node: Node, output_nr: int) -> list[Record]:
    """The calls that returned output ``output_nr`` of ``node``, in order of execution."""
    metadata: Any = node.metadata
    table: dict[int, list[Record]] | None = metadata.get(METADATA_KEY)
    return [] if table is None else table.get(output_nr, [])


_LIVE: weakref.WeakSet[ModuleCall] = weakref.WeakSet()


def live_calls() -> int:
    """How many calls are alive in this process: zero once every graph is gone."""
    return len(_LIVE)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply ``function`` to every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(v, function) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(v, function) for v in value]
    if isinstance(value, dict):
        return {k: map_tensors(v, function) for k, v in value.items()}
    return value


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Every tensor among the arguments of a call, positional ones first."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # nearly always
        return args
    return (*iter_tensors(args), *iter_tensors(kwargs))


@dataclass(eq=False, repr=False)
class ModuleCall:
    """What a module received and returned in one forward execution.

    Attributes:
        module: The module.
        args: Positional arguments, as passed.
        kwargs: Keyword arguments, as passed.
        inputs: Every tensor among the arguments, positional ones first, in order.
        edges: The gradient edge of each input before the forward; ``None`` for constants, leaves.
        outputs: Every tensor in the return value, detached.
        output_nr: Position in ``outputs`` of the tensor that is differentiated at present.
        grad_output: Gradient of the loss with respect to that tensor; ``None`` before backward.
        node: The autograd node of that tensor, only while it is visited: the node owns the call.
        indices: The samples this view shows; ``None`` for all.
        memo: What was computed from the columns at hand; forgotten after each visit.
        constants: What was computed from the call alone (patches, indices of maxima).
        frame: This execution as it was seen before it ran; ``frame.parent`` is the hooked module
            execution that encloses it.
        thread: The thread that ran the forward pass.
        training: Whether the module was in train mode then.
        is_rewired: The module changed a *view* in place, so that autograd rewrote the graph behind
            its input: the edges lead nowhere, and only the output's own node knows the way.
        is_readable: What autograd saved may be read by others: no hooks stand before it, as in a
            checkpoint, which gives every tensor once.
    """

    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]
    edges: tuple[Edge | None, ...]
    outputs: tuple[Tensor, ...]
    frame: Frame | None
    thread: int
    training: bool = False
    is_rewired: bool = False
    is_readable: bool = False
    output_nr: int = 0
    grad_output: Tensor | None = None
    node: Any = None
    indices: tuple[int, ...] | None = None
    memo: dict[Any, Any] = field(default_factory=dict)
    constants: dict[Any, Any] = field(default_factory=dict)
    _versions: tuple[int, ...] = ()
    _released: bool = False
    _is_constant: bool = False
    _whole: ModuleCall | None = None

    def __post_init__(self) -> None:
        if self._whole is None:
            _LIVE.add(self)

    @property
    def input(self) -> Tensor:
        """The first input tensor, in the dtype of the gradient."""
        return self.tensor_input(0)

    @property
    def output(self) -> Tensor:
        """The output tensor that is differentiated, in the dtype of the gradient.

        Detached, except while quantities are differentiable (``create_graph=True``).

        Raises:
            OverwrittenInputError: The tensor was changed in place since the forward pass, or it
                cannot be computed again for ``create_graph=True``.
            ReleasedIOError: An earlier backward pass freed it.
        """
        self._check_released()
        slot = len(self.inputs) + self.output_nr
        stored = self._read(self.outputs[self.output_nr], slot, "output")
        return self._attached(stored) if self._is_differentiable else stored

    @property
    def output_shape(self) -> torch.Size:
        """Shape of the output; available even where its values were overwritten."""
        self._check_released()
        return self.outputs[self.output_nr].shape

    @property
    def input_shape(self) -> torch.Size:
        """Shape of the first input; available even where its values were overwritten."""
        self._check_released()
        return self.inputs[0].shape

    @property
    def batch_size(self) -> int:
        """Number of samples ``N``: the length of axis 0 of the first input."""
        self._check_released()
        return int(self.inputs[0].shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which derivatives are computed: that of the gradient."""
        if self.grad_output is not None:
            return self.grad_output.dtype
        return self.outputs[self.output_nr].dtype

    @property
    def path(self) -> str:
        """Where the module sits in the model that was extended, for messages."""
        path = getattr(self.module, PATH_ATTRIBUTE, "")
        name = type(self.module).__name__
        return f"{name} '{path}'" if path else name

    def tensor_input(self, index: int) -> Tensor:
        """Input tensor number ``index``, in the dtype of the gradient.

        Raises:
            OverwrittenInputError: The tensor was changed in place since the forward pass.
            ReleasedIOError: An earlier backward pass freed the inputs.
        """
        self._check_released()
        return self._read(self.inputs[index], index, "input")

    def saved(self, name: str) -> Tensor | None:
        """What torch keeps for its own backward pass at the node of the present output.

        Args:
            name: As torch calls it: ``"result1"`` for ``grad_fn._saved_result1``.

        Returns:
            The tensor, for the samples that this view shows; ``None`` if there is none of that name
            whose first axis is the batch's, if it may not be read, or if the output is not being
            visited.
        """
        if not self.is_readable:
            return None
        whole = self.full
        found: Tensor | None = getattr(whole.node, f"_saved_{name}", None)
        if found is None or found.shape[:1] != whole.outputs[self.output_nr].shape[:1]:
            return None
        return found if self.indices is None else found[list(self.indices)]

    def parameter(self, name: str) -> Tensor:
        """Parameter ``name`` of the module (dots allowed), detached, in the dtype of the gradient.

        Also answers for a tensor attribute that is no parameter, as under a parametrization.
        """
        owner: Any = self.module
        *parents, last = name.split(".")
        for part in parents:
            owner = getattr(owner, part)
        value: Tensor = getattr(owner, last)
        return self._cast(value if self._is_differentiable else value.detach())

    def subsample(self, indices: Sequence[int] | None) -> ModuleCall:
        """A view of this call that shows only some samples.

        Args:
            indices: Positions along axis 0; ``None`` returns the call itself.

        Returns:
            A call whose inputs, outputs and ``grad_output`` hold the chosen samples. Tensors whose
            axis 0 is not the batch are left as they are.

        Raises:
            UsageError: An index is out of range, or two mean the same sample.
        """
        if indices is None:
            return self
        size = self.batch_size
        bad = [i for i in indices if not -size <= i < size]
        if bad:
            raise UsageError(
                f"subsampling asks for sample {bad[0]}, but {self.path} saw a batch of {size} "
                f"samples: use indices from 0 to {size - 1}."
            )
        if len({i % size for i in indices}) < len(indices):
            raise UsageError(
                f"subsampling names a sample of a batch of {size} twice: {list(indices)}."
            )
        known = range(size) if self.indices is None else self.indices
        pick = torch.as_tensor(list(indices), device=self.outputs[0].device, dtype=torch.long)

        def take(tensor: Tensor) -> Tensor:
            return tensor[pick] if tensor.dim() and tensor.shape[0] == size else tensor

        view = ModuleCall(
            module=self.module,
            args=map_tensors(self.args, take),
            kwargs=map_tensors(self.kwargs, take),
            inputs=tuple(take(t) for t in self.inputs),
            edges=self.edges,
            outputs=tuple(take(t) for t in self.outputs),
            frame=self.frame,
            thread=self.thread,
            training=self.training,
            is_rewired=self.is_rewired,
            is_readable=self.is_readable,
            output_nr=self.output_nr,
            grad_output=None if self.grad_output is None else take(self.grad_output),
            indices=tuple(known[i] for i in indices),
            _whole=self.full,
        )
        stored = zip((*self.inputs, *self.outputs), self._versions, strict=True)
        fresh = [tensor._version == version for tensor, version in stored]
        seen = (*view.inputs, *view.outputs)
        view._versions = tuple(t._version if ok else -1 for t, ok in zip(seen, fresh, strict=True))
        return view

    def move_batch_axis(self, axis: int) -> ModuleCall:
        """A view of this call whose present output has the samples on axis 0.

        Args:
            axis: Which axis of the output holds them in truth.
        """
        outputs = list(self.outputs)
        outputs[self.output_nr] = outputs[self.output_nr].movedim(axis, 0)
        grad = self.grad_output
        view = replace(
            self,
            outputs=tuple(outputs),
            grad_output=None if grad is None else grad.movedim(axis, 0),
            node=None,
            is_readable=False,  # what autograd saved has the samples where they were
            memo={},
            constants={},
            _whole=self.full,
        )
        return view

    def retained(self) -> ModuleCall:
        """A copy that keeps inputs and outputs when this call is released, until it is dropped.

        It lets go of the graph, except while quantities are differentiable (``create_graph=True``).
        """
        kept = copy(self)
        kept.memo, kept.constants, kept.node = {}, {}, None
        if not torch.is_grad_enabled():
            kept.edges, kept.frame = (None,) * len(self.edges), None
            kept.inputs = tuple(tensor.detach() for tensor in self.inputs)
            kept.args = map_tensors(self.args, Tensor.detach)
            kept.kwargs = map_tensors(self.kwargs, Tensor.detach)
        kept._whole = None if self._whole is None else self._whole.retained()
        return kept

    @property
    def full(self) -> ModuleCall:
        """The call with all samples: itself, unless it is a view made by :meth:`subsample`."""
        return self if self._whole is None else self._whole

    @contextmanager
    def constant(self) -> Iterator[None]:
        """Outputs and parameters stay detached within the block, whatever the grad mode."""
        before, self._is_constant = self._is_constant, True
        try:
            yield
        finally:
            self._is_constant = before

    @property
    def _is_differentiable(self) -> bool:
        return torch.is_grad_enabled() and not self._is_constant

    def release(self) -> None:
        """Free inputs and outputs; any later use raises :class:`ReleasedIOError`."""
        self._released = True
        self.args, self.kwargs, self.inputs, self.outputs = (), {}, (), ()
        self.grad_output = None
        self.memo.clear()
        self.constants.clear()

    @property
    def is_released(self) -> bool:
        """Whether inputs and outputs were freed."""
        return self._released

    def _check_released(self) -> None:
        if self._released:
            raise ReleasedIOError(
                f"{self.path}: the inputs and outputs of this forward pass were freed by an "
                "earlier backward pass. Pass retain_graph=True to backpack(...) (as well as to "
                "backward()) in every backward pass but the last."
            )

    def _attached(self, stored: Tensor) -> Tensor:
        """The output as a function of inputs and parameters, by running the forward once more.

        Storing the output with its graph instead would be a cycle.
        """
        whole = self.full
        key = ("attached", self.output_nr)
        if key not in whole.memo:
            for slot, tensor in enumerate(whole.inputs):
                whole._read(tensor, slot, "input")
            result = whole.module.forward(*whole.args, **whole.kwargs)
            whole.memo[key] = list(iter_tensors(result))[self.output_nr]
        again = self._cast(whole.memo[key])
        if self.indices is not None:
            again = again[list(self.indices)]
        if again.shape != stored.shape or not torch.allclose(again, stored):
            raise OverwrittenInputError(
                f"{self.path}: create_graph=True needs its output as a function of its input, but "
                "its forward pass gives another output when it runs again."
            )
        return again

    def _read(self, tensor: Tensor, slot: int, what: str) -> Tensor:
        if tensor._version != self._versions[slot]:
            raise OverwrittenInputError(
                f"{self.path}: its {what} was changed in place after it was stored, so derivatives "
                "would be computed from overwritten memory. Use an out-of-place operation, or "
                "clone the tensor before changing it."
            )
        return self._cast(tensor)

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype != self.dtype:
            return tensor.to(self.dtype)
        return tensor
