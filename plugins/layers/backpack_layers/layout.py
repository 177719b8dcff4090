"""Refuses inputs without a batch axis, which torch accepts for many layers."""

from __future__ import annotations

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View


def require_axes(view: View, dims: int, layout: str) -> None:
    """Raise an error unless the input has a batch axis.

    Args:
        view: The forward execution.
        dims: How many axes an input with a batch axis has at least.
        layout: How to write such an input, for the message.

    Raises:
        UnsupportedError: The input has fewer axes.
    """
    if len(view.input_shape) < dims:
        raise UnsupportedError(
            f"{view.path} saw an input of shape {list(view.input_shape)}, which has no batch axis, "
            f"so it has no samples: use an input {layout}."
        )


def require_channels(view: View) -> None:
    """Raise an error unless the input of a layer ``...1d`` to ``...3d`` has a batch axis."""
    # The names of all base classes are searched, because a subclass may have any name.
    names = (t.__name__ for t in type(view.module).__mro__)
    dims = next(int(name[-2]) for name in names if name[-2:] in {"1d", "2d", "3d"})
    require_axes(view, dims + 2, f"[N, C, {'D, H, W'[-3 * dims + 2 :]}]")
