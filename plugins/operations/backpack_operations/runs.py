"""Finds where samples lie in an operand, if it is known where they lie in the result.

If every entry of an operand sends to entries of one sample only, columns need not be kept apart
there: one set of columns holds those of all samples. This happens in a convolution whose groups are
samples (``[1, N · C, H, W]``), and in the operations before it.

The entries of a sample come in runs of equal length: in row-major order, entry ``f`` belongs to
sample ``f // run % N``. A view keeps the length; other operations are handled by their type.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any, NamedTuple

from backpack_core._torch import Node
from backpack_operations import nodes

Shape = tuple[int, ...]


class Lie(NamedTuple):
    """Where samples lie in a tensor: on which axis, and how many entries each has in a row.

    Attributes:
        axis: The axis along which samples follow each other.
        width: How many of its entries in a row belong to one sample.
    """

    axis: int
    width: int

    @classmethod
    def of(cls, shape: Shape, samples: int, run: int) -> Lie | None:
        """The axis and width, from the length of runs; ``None`` if a run ends inside an axis."""
        for axis, length in enumerate(shape):
            behind = max(1, prod(shape[axis + 1 :]))
            width, rest = divmod(run, behind)
            if width and not rest and not length % (samples * width):
                return cls(axis, width)
        return None

    def run(self, shape: Shape) -> int:
        """The length of runs."""
        return self.width * prod(shape[self.axis + 1 :])


def run_behind(node: Node, output_nr: int, position: int, samples: int, run: int) -> int | None:
    """The length of runs in an operand; ``None`` if it may send something to several samples.

    Args:
        node: An operation.
        output_nr: An output of it.
        position: Which operand, as a position in ``node.next_functions``.
        samples: ``N``, at least two.
        run: The length of runs at the output.
    """
    child, nr = node.next_functions[position]
    assert child is not None
    shape, inp = nodes.lengths_of(node, output_nr), nodes.lengths_of(child, nr)
    if nodes.operation_of(node) in nodes.VIEWS or nodes.hands_on(node):
        return run
    lie = Lie.of(shape, samples, run)
    behind = None if lie is None else _behind(node, output_nr, position, lie, shape, inp)
    if behind is None or inp[behind.axis] % (samples * behind.width):
        return None
    return behind.run(inp)


def _behind(
    node: Any, output_nr: int, position: int, lie: Lie, shape: Shape, inp: Shape
) -> Lie | None:
    """Where samples lie in an operand; ``None`` if it may send something to several samples."""
    operation, axis = nodes.operation_of(node), lie.axis
    if operation in nodes.TURNS:
        return lie._replace(axis=nodes.order_of(node, len(shape))[axis])
    if operation == "Convolution":
        return _of_convolution(node, position, lie, shape, inp)
    if operation in {"Mm", "Bmm", "Addmm", "Baddbmm"}:
        position -= operation in {"Addmm", "Baddbmm"}
        if position < 0:
            return _of_broadcast(lie, shape, inp)
        # The first factor does not have the columns of the result, the second not its rows.
        return None if axis == len(shape) - 1 - position else lie
    if operation in nodes.ELEMENTWISE | {"Expand", "Repeat"}:
        return _of_broadcast(lie, shape, inp)
    if operation == "ConstantPadNd":
        return lie if axis < len(shape) - len(node._saved_pad) // 2 else None
    if operation in nodes.IMAGES:
        return lie if axis < len(shape) - int(re.findall(r"(\d)D", operation)[0]) else None
    if "BatchNorm" in operation and axis == 1:  # each channel by itself
        return lie if position == 0 else lie._replace(axis=0)
    if (axes := nodes.axes_left_alone(node, len(inp))) and len(shape) in (len(axes), len(inp)):
        kept = axes if len(shape) < len(inp) else [*range(len(inp))]
        return lie._replace(axis=kept[axis]) if kept[axis] in axes else None
    return lie if axis == 0 and nodes.keeps_rows(node, output_nr, position) else None


def _of_broadcast(lie: Lie, shape: Shape, inp: Shape) -> Lie | None:
    """The axis of the samples in an operand that is broadcast, counted from the last axis."""
    axis = lie.axis - (len(shape) - len(inp))
    return lie._replace(axis=axis) if axis >= 0 and inp[axis] == shape[lie.axis] else None


def _of_convolution(node: Any, position: int, lie: Lie, shape: Shape, inp: Shape) -> Lie | None:
    """Samples on axis 0 (of the input), or on axis 1 as groups of channels that do not meet."""
    axis, groups = lie.axis, node._saved_groups
    if axis == 0:
        return lie if position == 0 else None
    if axis > 1:
        return None
    is_by_channel = position and not (position == 1 and node._saved_transposed)
    if is_by_channel:
        return lie._replace(
            axis=0
        )  # each entry of axis 0 of a kernel or bias is one output channel
    of_group, rest = divmod(lie.width * groups, shape[1])  # groups per sample in a row
    if rest or not of_group:
        return None
    return Lie(0 if position else 1, of_group * inp[0 if position else 1] // groups)
