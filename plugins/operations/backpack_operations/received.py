"""What an extended model received in one forward pass: sizes, memory layout and rows of inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from backpack_core._torch import Node, has_memory, is_distributed, memory_of
from backpack_core.errors import UsageError
from backpack_core.record.call import Call
from backpack_core.record.models import Run, owner_of
from backpack_core.record.nested import items_of
from backpack_operations._torch import modes
from backpack_operations.row_sums import (
    Made,
    Sums,
    can_add,
    has_rows,
    has_tokens,
    sums_of,
    sums_of_pixels,
)
from backpack_products.substitutes import note_parameters

# The key in the metadata of autograd nodes for outputs that a model returned, each with its run.
RETURNED: Final = "backpack_returned"
SUMS_IN_ROW: Final = 32  # that have a memory together
Place = tuple[int, ...]  # the index of an argument, and of the item at each level of containers
Rows = tuple[int, range]  # a memory, and some rows of the tensor that owns it


class SampleLayout(NamedTuple):
    """The memory layout of a tensor that has samples.

    Attributes:
        shape: Its shape.
        strides: Its strides.
        offset: Its storage offset.
        axis: The axis of the samples; negative if it is unknown.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    axis: int

    @property
    def ends(self) -> tuple[int, int]:
        """The storage indices of the first and the last element."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset, self.offset + sum((length - 1) * step for length, step in steps)

    def axis_in(self, tensor: Tensor) -> int | None:
        """The axis of a tensor in the same memory that has length and stride of the sample axis."""
        if self.axis < 0:
            return None
        length, stride = self.shape[self.axis], self.strides[self.axis]
        axes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        return next((index for index, axis in axes if axis == (length, stride)), None)

    def passed_on(self, tensor: Tensor, result: Tensor) -> SampleLayout | None:
        """The layout of what a layer made of a tensor in the same memory; ``None`` if unknown.

        The layer keeps the first axes. Axis 0 may hold several rows of each sample, one sample
        after the other, as of ``x.flatten(0, 1)``.
        """
        axis = self.axis_in(tensor)
        lead = slice(0, (axis or 0) + 1)
        if not tensor.dim() or result.shape[lead] != tensor.shape[lead]:
            return None
        if axis is not None:
            return layout_of(result, axis)
        samples, step = self.shape[0], self.strides[0]
        count, rest = divmod(step, tensor.stride(0)) if tensor.stride(0) else (0, 1)
        is_whole = len(tensor) == samples * count and tensor.storage_offset() == self.offset
        if self.axis or rest or not is_whole:
            return None
        shape, strides = (samples, count, *result.shape[1:]), result.stride()
        return SampleLayout(shape, (count * strides[0], *strides), layout_of(result, 0).offset, 0)

    def is_in_front(self, tensor: Tensor) -> bool:
        """Whether axis 0 of a tensor in the same memory runs along the samples, or some of them."""
        if self.axis < 0 or not tensor.dim():
            return False
        is_along = tensor.stride(0) == self.strides[self.axis]
        return is_along and len(tensor) <= self.shape[self.axis]


def layout_of(tensor: Tensor, axis: int) -> SampleLayout:
    """The layout of a tensor that has samples on an axis."""
    return SampleLayout(
        tuple(tensor.shape), tensor.stride(), cast(int, tensor.storage_offset()), axis
    )


class ModelInput(NamedTuple):
    """A tensor that an extended model received.

    Attributes:
        path: The index of the argument, and then of the item at each level of nested containers.
        layout: Its memory layout.
        memory: The number of its memory; see ``memory_of``.
        tensor: A weak reference to it.
        dtype: Its dtype.
    """

    path: Place
    layout: SampleLayout
    memory: int
    tensor: Callable[[], Tensor | None]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.layout.shape

    @property
    def span(self) -> tuple[int, int, int]:
        """Its memory, and the storage indices of its first and last element."""
        return self.memory, *self.layout.ends


class ModelRun(Run):
    """What an extended model received, with the memory of its inputs.

    Attributes:
        memories: The layout of input tensors, and of what layers made of them, by memory.
        inputs: Its input tensors.
        rows: Which rows of which memory its first input tensor is; see :func:`rows_of`.
        modes: The classes of modes around it that may replace functions of torch.
        made: Results of layers without a graph that no further layer received. Values tell which
            rows come from which.
        sums: Of the rows of input tensors, by path, depth and unit; the inputs may be gone when
            values are compared. Only those that are compared with what such layers received.
    """

    memories: dict[int, SampleLayout]
    inputs: list[ModelInput]
    made: list[Made]

    def __init__(
        self, placed: Sequence[tuple[Place, Tensor]], axis: int, is_distributed: bool
    ) -> None:
        """Note what the model received; see :class:`Run`."""
        self.axis, self.is_distributed, self.has_computed_input = axis, is_distributed, False
        self.memories, self.inputs = {}, []
        # A mode of a library may say that it replaces nothing, such as a recorder's.
        self.modes = tuple([kind for kind in modes() if getattr(kind, "replaces", True)])
        self._passed: list[object] = []  # keeps the memories of results from being reused
        self.made, self.sums = [], dict[tuple[Place, int, int], Sums]()
        self._last: tuple[Tensor, Sums | None] | None = None  # the last result, and its source
        self._room: Tensor | None = None  # for sums
        sizes: list[int] = []
        for path, tensor in placed:
            self.has_computed_input |= tensor.grad_fn is not None
            has_axis = tensor.dim() > axis and not tensor.is_nested
            if has_axis:
                sizes.append(tensor.shape[axis])
            if has_memory(tensor):
                memory, layout = memory_of(tensor), layout_of(tensor, axis)
                if has_axis:
                    self.memories[memory] = layout
                if not axis:
                    reference = weakref.ref(tensor)
                    self.inputs.append(ModelInput(path, layout, memory, reference, tensor.dtype))
        self.sizes = tuple(sizes)
        self.rows = rows_of(placed[0][1]) if placed and not axis else None

    @property
    def facts(self) -> Iterable[Any]:
        """What decisions about the whole pass may depend on."""
        facts = [self.axis, self.is_distributed, self.has_computed_input, torch.Size(self.sizes)]
        facts += self.modes, len(self.inputs), self.rows is None
        for path, layout, _, _, dtype in self.inputs:
            facts += path, dtype, torch.Size(layout.shape)
        return facts

    def receives(self, tensors: Iterable[Tensor]) -> int:
        """Whether any tensor shares memory with the model's input: 1, or 2 if axis 0 holds samples.

        Axis 0 holds samples if it has the stride of the input's batch axis. A transposed view does
        not.
        """
        shared = self._sharing(tensors)
        return bool(shared) + any(layout.is_in_front(t) for t, layout in shared)

    def _sharing(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, SampleLayout]]:
        """The tensors that share memory with the model's input, each with the layout of that."""
        dense = [*filter(has_memory, tensors)] if self.memories else ()
        return [(t, self.memories[m]) for t in dense if (m := memory_of(t)) in self.memories]

    def pass_on(self, tensors: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Treat results without a graph as inputs of the model; see :class:`Run`."""
        tensors = [tensor for tensor in tensors if has_memory(tensor)]
        results = [result for result in results if has_memory(result)]
        for result in filter(has_rows, results):
            self._last = result, self._source(tensors)
        for tensor, layout in self._sharing(tensors):
            for result in results:
                found = layout.passed_on(tensor, result)
                if found is not None:  # a view of the input has its memory in the table already
                    self.memories.setdefault(memory_of(result), found)
                    self._passed.append(hold_address(result))

    def _source(self, tensors: Sequence[Tensor]) -> Sums | None:
        """The rows of what a layer received; ``None`` if there is one of each sample.

        If it received the last result, its rows come from where that result's came from.
        """
        of_rows = (tensor for tensor in tensors if has_rows(tensor) or has_tokens(tensor))
        tensor, last = next(of_rows, None), self._last
        if last is not None and tensor is not None and _lie_together(tensor, last[0]):
            return last[1]
        self._add_up()
        layout = None if tensor is None else self.memories.get(memory_of(tensor))
        if tensor is None or (layout is not None and layout.axis_in(tensor) == 0):
            return None
        found = self._kept(sums_of(tensor))
        self._note_inputs(found.depth, found.unit)
        return found

    def _note_inputs(self, depth: int, unit: int) -> None:
        """Add up the rows of the model's inputs, to be compared with others of these units."""
        for given in self.inputs:
            whole, key = given.tensor(), (given.path, depth, unit)
            is_new = whole is not None and key not in self.sums
            if whole is not None and is_new and can_add(whole, depth, unit):
                self.sums[key] = self._kept(sums_of(whole, depth, unit))

    def _add_up(self) -> None:
        """Add up the rows of the last result, which no further layer received, and let it go."""
        if self._last is not None:
            result, source = self._last
            if result.dim() > 3:  # pixels of images become rows
                self.made.append(Made(self._kept(sums_of_pixels(result)), source))
            self.made.append(Made(self._kept(sums_of(result)), source))
            self._last = None

    def _kept(self, sums: Sums) -> Sums:
        """The same sums, in a memory that all have together.

        Small tensors that stay, one after each large one that goes, would split up the heap.
        """
        rows, count = sums.rows, sums.rows.numel()
        room = self._room
        if room is None or len(room) < count or room.device != rows.device:
            room = rows.new_empty(SUMS_IN_ROW * count)
        self._room = room[count:]
        return sums._replace(rows=room[:count].view(rows.shape).copy_(rows))

    def note_returned(self, results: Iterable[Tensor]) -> None:
        """Note what the model returned; see :func:`returned`."""
        self._add_up()
        if not self.sizes:
            return
        for tensor in results:
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata.setdefault(RETURNED, {})[tensor.output_nr] = self

    def seen_as(self, memories: dict[int, SampleLayout]) -> ModelRun:
        """The run as a call refers to it whose inputs have other memories."""
        run = copy(self)
        run.memories = memories
        return run


def placed_tensors(value: Any, *path: int) -> Iterator[tuple[Place, Tensor]]:
    """Every tensor, with its path: the index of the item that it lies in, at each level."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for number, item in enumerate(items_of(value)):
            yield from placed_tensors(item, *path, number)


def run_of(model: Module | None, received: Sequence[Any], axis: int) -> ModelRun:
    """What is noted of a forward pass of an extended model.

    Raises:
        UsageError: No argument has the declared batch axis.
    """
    note_parameters(model)
    placed = [*placed_tensors(received)]
    run = ModelRun(placed, axis, is_distributed(model))
    if axis and placed and not run.sizes:
        raise UsageError(
            f"extend(..., batch_axis={axis}) was called, but the model received no tensor "
            f"with such an axis: {', '.join(str(list(t.shape)) for _, t in placed)}."
        )
    return run


def returned(node: Node) -> Mapping[int, ModelRun]:
    """The runs of extended models that returned outputs of a node, by the number of the output."""
    metadata: Any = node.metadata
    runs: Mapping[int, ModelRun] = metadata.get(RETURNED, MappingProxyType({}))
    return runs


def is_returned(node: Node, number: int) -> bool:
    """Whether an output of a node is what an extended model returned for inputs without a graph."""
    run = returned(node).get(number)
    return run is not None and not run.has_computed_input


def memories_of_buffers(call: Call) -> set[int]:
    """The memories of all buffers of a call's model."""
    return set(map(memory_of, filter(has_memory, owner_of(call.module).buffers())))


def hold_address(tensor: Tensor) -> object:
    """An object that keeps ``memory_of`` from reusing a number while it lives."""
    return StorageWeakRef(tensor.untyped_storage())


def _lie_together(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same entries of one memory."""
    is_same = memory_of(tensor) == memory_of(other)
    return is_same and layout_of(tensor, 0) == layout_of(other, 0)


def is_by_sample(tensor: Tensor, *sizes: int) -> bool:
    """Whether a tensor, or what it is a view of, has an entry for each sample, by its length."""
    wholes = tensor, tensor if tensor._base is None else tensor._base
    return any(whole.shape[:1].numel() in sizes for whole in wholes)


def span_of(tensor: Tensor) -> tuple[int, int, int]:
    """The memory of a tensor, and the storage indices of its first and last element."""
    return memory_of(tensor), *layout_of(tensor, 0).ends


def rows_of(tensor: Tensor) -> Rows | None:
    """The memory of a tensor, and which rows of its base it is: ``x[2:4]`` is rows 2 and 3.

    ``None`` if axis 0 is not axis 0 of the base, as for ``x[t]``.
    """
    if not tensor.dim() or not has_memory(tensor):
        return None
    base, memory, count = tensor._base, memory_of(tensor), len(tensor)
    if base is None:
        return memory, range(count)
    if base.dim() < min(2, tensor.dim()):
        return None  # a flat base has no rows
    row = base.stride(0)
    step, rest = divmod(tensor.stride(0), row) if row and row == max(base.stride()) else (0, 1)
    is_single = count == 1 and base.dim() != tensor.dim()
    if rest or not step or (is_single and tensor.stride(0) == base.stride(1)):
        return None
    first = (tensor.storage_offset() - base.storage_offset()) // row
    return memory, range(first, first + count * step, step)


def relations(rows: Iterable[Rows]) -> Iterator[Any]:
    """How rows of memories lie to each other: they may be parts of one batch."""
    rows, first = [*rows], dict[int, int]()
    for memory, some in rows:
        first[memory] = min(some.start, first.get(memory, some.start))
    numbers = {memory: number for number, memory in enumerate(first)}
    for memory, some in rows:
        start = first[memory]
        yield numbers[memory]
        yield torch.Size((some.start - start, some.stop - start, some.step))
