"""From a tensor to a view of it, for columns at the tensor."""

from __future__ import annotations

from torch import Tensor

from backpack_core.record.call import Layout


def look_through(mat: Tensor, layout: Layout) -> Tensor:
    """Columns at a view, from columns at the tensor that it looks at.

    Args:
        mat: Shape ``[V, *base]``.
        layout: Where the view's numbers lie.

    Returns:
        Shape ``[V, *view]``.
    """
    size, stride, offset, base_size, base_stride = layout
    span = 1 + sum((n - 1) * s for n, s in zip(base_size, base_stride, strict=True))
    flat = mat.new_zeros(len(mat), span)
    flat.as_strided((len(mat), *base_size), (span, *base_stride)).copy_(mat)
    return flat.as_strided((len(mat), *size), (span, *stride), offset)
