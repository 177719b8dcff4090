"""Where the samples' entries lie in an operand, if it is known where they lie in the result.

What is kept apart by sample needs no columns for each sample where every entry of a tensor sends
to entries of one sample only: there, one set of columns holds those of all. So it is in a
convolution whose groups are samples (``[1, N · C, H, W]``), and in what leads there.

Entries of a sample come in runs: in the order of memory, entry ``f`` is of sample
``f // run % N``. A view keeps the length of runs; other operations are looked up by their type.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any, NamedTuple

from backpack_core._torch import Node
from backpack_operations import nodes

Shape = tuple[int, ...]


class Lie(NamedTuple):
    """Where samples lie in a tensor.

    Attributes:
        axis: Samples follow each other on this axis.
        width: How many of its entries in a row are of one sample.
    """

    axis: int
    width: int

    @classmethod
    def of(cls, shape: Shape, samples: int, run: int) -> Lie | None:
        """From the length of runs; ``None`` if these end on several axes."""
        behind = prod(shape)
        for axis, length in enumerate(shape):
            behind //= max(1, length)
            width, rest = divmod(run, behind)
            if width and not rest and not length % (samples * width):
                return cls(axis, width)
        return None

    def run(self, shape: Shape) -> int:
        """The length of runs."""
        return self.width * prod(shape[self.axis + 1 :])


def run_behind(node: Node, number: int, position: int, samples: int, run: int) -> int | None:
    """The length of runs in an operand; ``None`` if it may send something to several samples.

    Args:
        node: An operation.
        number: An output of it.
        position: Which operand, as a position in ``node.next_functions``.
        samples: ``N``, at least two.
        run: The length of runs at the output.
    """
    child, nr = node.next_functions[position]
    assert child is not None
    shape, inp = nodes.lengths_of(node, number), nodes.lengths_of(child, nr)
    if nodes.operation_of(node) in nodes.VIEWS or nodes.hands_on(node):
        return run
    lie = Lie.of(shape, samples, run)
    found = None if lie is None else _behind(node, number, position, lie, shape, inp)
    is_there = found is not None and not inp[found.axis] % (samples * found.width)
    return found.run(inp) if found is not None and is_there else None


def _behind(
    node: Any, number: int, position: int, lie: Lie, shape: Shape, inp: Shape
) -> Lie | None:
    """Where samples lie in an operand."""
    operation, axis = nodes.operation_of(node), lie.axis
    if operation in nodes.TURNS:
        return lie._replace(axis=nodes.order_of(node, len(shape))[axis])
    if operation == "Convolution":
        return _of_convolution(node, position, lie, shape, inp)
    if operation in {"Mm", "Bmm", "Addmm", "Baddbmm"}:
        position -= operation in {"Addmm", "Baddbmm"}
        if position < 0:
            return _of_broadcast(lie, shape, inp)
        # The first factor has no columns of the result, the second no rows.
        return None if axis == len(shape) - 1 - position else lie
    if operation in nodes.ELEMENTWISE | {"Expand", "Repeat"}:
        return _of_broadcast(lie, shape, inp)
    if operation == "ConstantPadNd":
        return lie if axis < len(shape) - len(node._saved_pad) // 2 else None
    if operation in nodes.IMAGES:
        return lie if axis < len(shape) - int(re.findall(r"(\d)D", operation)[0]) else None
    if "BatchNorm" in operation and axis == 1:  # of channels, by themselves
        return lie if position == 0 else lie._replace(axis=0)
    if (axes := nodes.axes_left_alone(node, len(inp))) and len(shape) in (len(axes), len(inp)):
        kept = axes if len(shape) < len(inp) else [*range(len(inp))]
        return lie._replace(axis=kept[axis]) if kept[axis] in axes else None
    return lie if axis == 0 and nodes.keeps_rows(node, number, position) else None


def _of_broadcast(lie: Lie, shape: Shape, inp: Shape) -> Lie | None:
    axis = lie.axis - (len(shape) - len(inp))
    return lie._replace(axis=axis) if axis >= 0 and inp[axis] == shape[lie.axis] else None


def _of_convolution(node: Any, position: int, lie: Lie, shape: Shape, inp: Shape) -> Lie | None:
    """Groups of channels meet each other alone; a kernel has its outputs, or groups, in front."""
    axis, groups = lie.axis, node._saved_groups
    if axis == 0:
        return lie if position == 0 else None
    if axis > 1:
        return None
    first = position and not (position == 1 and node._saved_transposed)
    if first:
        return lie._replace(axis=0)  # a kernel's or an offset's entries give one channel each
    of_group, rest = divmod(lie.width * groups, shape[1])  # groups that a sample has in a row
    if rest or not of_group:
        return None
    return Lie(0 if position else 1, of_group * inp[0 if position else 1] // groups)
