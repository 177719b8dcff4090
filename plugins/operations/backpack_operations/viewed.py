"""Columns at a view and at its base, and the edge that continues inside of a call."""

from __future__ import annotations

from torch import Tensor

from backpack_core.record.call import INNER, INSIDE, Edge, Layout, Site


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


def _blank(layout: Layout, mat: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros with the layout of the base, and their view."""
    size, base_size, base_stride = layout.size, layout.base_size, layout.base_stride
    span = 1 + sum((n - 1) * s for n, s in zip(base_size, base_stride, strict=True))
    flat = mat.new_zeros(len(mat), span)
    base = flat.as_strided((len(mat), *base_size), (span, *base_stride))
    return base, flat.as_strided((len(mat), *size), (span, *layout.stride), layout.offset)
