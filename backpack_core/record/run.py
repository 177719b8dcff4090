"""What an extended model received when it ran: how many rows, in which memory, of which list."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from backpack_core._torch import has_memory, hold_address, memory_of


class SampleLayout(NamedTuple):
    """How a tensor that has samples lies in its memory.

    Attributes:
        shape: Its shape.
        strides: Its strides.
        offset: Where it begins.
        axis: The axis of the samples; negative if that is unknown.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    axis: int

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last number in the memory that are its own."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset, self.offset + sum((length - 1) * step for length, step in steps)

    def axis_in(self, tensor: Tensor) -> int | None:
        """Which axis of a tensor in the same memory is that of the samples, as strides tell."""
        if self.axis < 0:
            return None
        length, stride = self.shape[self.axis], self.strides[self.axis]
        ways = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        return next((k for k, way in ways if way == (length, stride)), None)

    def is_in_front(self, tensor: Tensor) -> bool:
        """Whether axis 0 of a tensor in the same memory is that of samples, of some at least."""
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
        path: The number of the argument, and of the item of a list or dictionary, at each depth.
        layout: How it lies in its memory.
        memory: Its memory.
        tensor: Returns it, if somebody still holds it.
        dtype: The type of its numbers.
    """

    path: tuple[int, ...]
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
        """Its memory, and the first and last number there that are its own."""
        return self.memory, *self.layout.ends


class Run(NamedTuple):
    """What an extended model received in one run.

    Attributes:
        sizes: The lengths of axis 0 of its input tensors; one of them is the number of samples.
        memories: How input tensors, and what layers made of them, lie in their memories.
        is_distributed: Whether it runs inside of DistributedDataParallel.
        passed: Objects that keep the memories added by :meth:`pass_on` from being reused.
        has_computed_input: Whether an input has a graph: parameters or another model computed it.
        rows: Which rows of which memory the first of its input tensors is; see :func:`rows_of`.
        inputs: Its input tensors.
        axis: Where samples are said to be in them.
    """

    sizes: tuple[int, ...]
    memories: dict[int, SampleLayout]
    is_distributed: bool
    passed: list[object]
    has_computed_input: bool = False
    rows: tuple[int, range] | None = None
    inputs: tuple[ModelInput, ...] = ()
    axis: int = 0

    def receives(self, tensors: Iterable[Tensor]) -> int:
        """Whether any tensor shares memory with the model's input: 1, or 2 if samples are first.

        Samples are first if axis 0 has the same stride in both: a transposed view has another.
        """
        found = self._known(tensors)
        return bool(found) + any(layout.is_in_front(t) for t, layout in found)

    def _known(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, SampleLayout]]:
        """Those of some tensors that share a memory, with what is known of that."""
        given = [*filter(has_memory, tensors)] if self.memories else ()
        return [(t, self.memories[m]) for t in given if (m := memory_of(t)) in self.memories]

    def pass_on(self, tensors: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Count results without a graph as received, if a layer made them of the model's input.

        A module with a layer rule keeps samples where they are. Others may not: a table of
        positions is made from the input as well.
        """
        axes = [(t, layout.axis_in(t)) for t, layout in self._known(tensors)]
        for tensor, axis in axes:
            for result in results if axis is not None else ():
                lead = slice(0, (axis or 0) + 1)
                # A view shares memory with the input, and is known by it already.
                if result.shape[lead] == tensor.shape[lead] and has_memory(result):
                    self.memories.setdefault(memory_of(result), layout_of(result, axis or 0))
                    self.passed.append(hold_address(result))


def span_of(tensor: Tensor) -> tuple[int, int, int]:
    """The memory of a tensor, and the first and last number there that are its own."""
    return memory_of(tensor), *layout_of(tensor, 0).ends


def rows_of(tensor: Tensor) -> tuple[int, range] | None:
    """Which rows a tensor is of the one that it is a view of, as ``x[2:4]``, and of what memory.

    ``None`` if axis 0 is another one there, as of ``x[t]``.
    """
    if not tensor.dim() or not has_memory(tensor):
        return None
    base, memory, count = tensor._base, memory_of(tensor), len(tensor)
    if base is None:
        return memory, range(count)
    if base.dim() < min(2, tensor.dim()):
        return None  # a flat one has no rows
    row = base.stride(0)
    step, rest = divmod(tensor.stride(0), row) if row and row == max(base.stride()) else (0, 1)
    is_single = count == 1 and base.dim() != tensor.dim()
    if rest or not step or (is_single and tensor.stride(0) == base.stride(1)):
        return None
    first = (tensor.storage_offset() - base.storage_offset()) // row
    return memory, range(first, first + count * step, step)


def run_of(
    placed: Sequence[tuple[tuple[int, ...], Tensor]], axis: int, is_distributed: bool
) -> Run:
    """The run of a model that received some tensors.

    Args:
        placed: The tensors, each with its path.
        axis: Where samples are said to be in them.
        is_distributed: Whether it runs inside of DistributedDataParallel.
    """
    has_computed_input = False
    sizes: list[int] = []
    memories: dict[int, SampleLayout] = {}
    given: list[ModelInput] = []
    for path, tensor in placed:
        has_computed_input = has_computed_input or tensor.grad_fn is not None
        has_axis = tensor.dim() > axis and not tensor.is_nested
        if has_axis:
            sizes.append(tensor.shape[axis])
        if has_memory(tensor):
            memory, layout = memory_of(tensor), layout_of(tensor, axis)
            if has_axis:
                memories[memory] = layout
            if not axis:
                given.append(ModelInput(path, layout, memory, weakref.ref(tensor), tensor.dtype))
    rows = rows_of(placed[0][1]) if placed and not axis else None
    return Run(tuple(sizes), memories, is_distributed, [], has_computed_input, rows, tuple(given))


NO_RUN: Final[Run] = Run((), {}, False, [])
NO_RUN_OF_RANKS: Final[Run] = Run((), {}, True, [])
