"""Modules that return views, which may be overwritten in place later.

If a module returns a view (``Linear`` with three axes does), and the view is changed in place,
autograd removes the view's own node from the graph, or some users bypass it. The gradient of what
the module returned then arrives at the base. So the call is recorded there as well. The level of an
:class:`Edge` tells which call is addressed: zero is the view of all users of the output; ``n > 0``
is the ``n``-th of these calls, counted from the innermost.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.record import call as recorded
from backpack_core.record.call import VIEWED, Call, Edge, Site

# Levels below these calls, and below the call that returned the output itself.
INNER: Final = -1
INSIDE: Final = -2


class Layout(NamedTuple):
    """The memory layout of a view, relative to its base (the tensor that it is a view of)."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    base_size: torch.Size
    base_stride: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the view has as many elements as its base."""
        return self.size.numel() == self.base_size.numel()


def record_at_base(call: Call, index: int, output: Tensor, base: Tensor) -> None:
    """Record a call at the base of its output as well; see :func:`viewed_at`."""
    if output.dtype != base.dtype:
        return  # a real view of complex numbers: quantities go through the operations instead
    offset = int(output.storage_offset() - base.storage_offset())
    layout = Layout(output.shape, output.stride(), offset, base.shape, base.stride())
    node: Any = base.grad_fn
    table = node.metadata.setdefault(VIEWED, {})
    table.setdefault(base.output_nr, []).append((call, index, layout))


def has_call(node: Node) -> bool:
    """Whether a call is recorded at an output of a node, or at a view of one."""
    metadata: Any = node.metadata
    return VIEWED in metadata or recorded.has_call(node)


def site_at(edge: Edge) -> Site | None:
    """The site at an edge of any level; ``None`` if no call is recorded there."""
    node, output_nr, level = edge
    if level > 0:
        call, index, layout = viewed_at(node, output_nr)[level - 1]
        return Site(call, index, edge, layout)
    return None if level == INSIDE else recorded.site_at(edge)


def viewed_at(node: Node, output_nr: int) -> list[tuple[Call, int, Layout]]:
    """The calls that returned views of a node's output, innermost first.

    Returns:
        For each call: the call, the index of its output, and the layout of the view.
    """
    table: Any = node.metadata.get(VIEWED)  # type: ignore[attr-defined]
    calls: list[tuple[Call, int, Layout]] = [] if table is None else table.get(output_nr, [])
    return calls


def below(site: Site) -> Edge:
    """The edge at an output of a call that leads into the call, instead of to its visit."""
    node, output_nr, level = site.edge
    if level > 1:
        return Edge(node, output_nr, level - 1)
    return Edge(node, output_nr, INNER if level == 1 else INSIDE)


def look_through(layout: Layout, mat: Tensor) -> Tensor:
    """Take the view of columns at its base: ``[V, *base] → [V, *size]``."""
    base, view = _blank(layout, mat)
    base.copy_(mat)
    return view


def look_back(layout: Layout, mat: Tensor) -> Tensor:
    """Put columns at a view into zeros of its base: ``[V, *size] → [V, *base]``."""
    base, view = _blank(layout, mat)
    view.copy_(mat)
    return base


def rows_seen(layout: Layout, rows: Tensor, axis: int = 0) -> Tensor | None:
    """What is known of each row of the base, for the rows of a view on an axis.

    Args:
        layout: That of the view.
        rows: A number for each row of the base.
        axis: An axis of the view.

    Returns:
        A number for each of its entries; ``None`` if one has entries of several numbers.
    """
    base = rows.view(-1, *[1] * (len(layout.base_size) - 1)).expand(layout.base_size)
    seen = look_through(layout, base.unsqueeze(0)).squeeze(0).movedim(axis, 0).flatten(1)
    return None if bool((seen != seen[:, :1]).any()) else seen[:, 0]


def _blank(layout: Layout, mat: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros with the layout of the base, and their view."""
    size, base_size, base_stride = layout.size, layout.base_size, layout.base_stride
    span = 1 + sum((n - 1) * s for n, s in zip(base_size, base_stride, strict=True))
    flat = mat.new_zeros(len(mat), span)
    base = flat.as_strided((len(mat), *base_size), (span, *base_stride))
    return base, flat.as_strided((len(mat), *size), (span, *layout.stride), layout.offset)
