"""Decides whether forward passes of this thread are recorded."""

from __future__ import annotations

from threading import get_ident

from torch import is_grad_enabled
from torch.compiler import is_compiling

from backpack_core._torch import peek_transform, tracing_state
from backpack_core.record.storage import storage

_disabled: dict[int, int] = {}  # the number of blocks that each thread is in


class disable:
    """Record no forward pass of this thread inside the ``with`` block.

    Use it to get a plain gradient of an extended model without storing inputs and outputs. It is
    not the opposite of :class:`backpack_core.backpack`, which is about the backward pass.
    """

    def __enter__(self) -> disable:
        """Stop recording."""
        thread = get_ident()
        _disabled[thread] = _disabled.get(thread, 0) + 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Record again, unless an outer block says otherwise."""
        thread = get_ident()
        _disabled[thread] -= 1
        if not _disabled[thread]:
            del _disabled[thread]


def is_disabled() -> bool:
    """Whether this thread is inside ``disable()``."""
    return bool(_disabled) and get_ident() in _disabled


def is_recording(with_graph: bool = True) -> bool:
    """Whether the current forward pass is recorded: it has a graph, and nobody traces it.

    Args:
        with_graph: ``False`` asks for one that would be recorded if it had a graph.
    """
    return (
        not is_compiling()  # first, so that the compiler does not trace the rest
        and is_grad_enabled() is with_graph
        and peek_transform() is None
        and tracing_state() is None
        # Where a checkpoint recomputes, what was recorded the first time is recorded again.
        and not (_disabled and is_disabled() and not storage().is_computed_again())
    )
