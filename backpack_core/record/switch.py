"""Whether forward passes of this thread are recorded."""

from __future__ import annotations

import threading

import torch

from backpack_core._checkpoints import is_computed_again
from backpack_core._torch import peek_transform, tracing_state

_local = threading.local()


class disable:
    """Record nothing in forward passes inside this ``with`` block (of this thread).

    For a plain gradient of an extended model without keeping inputs and outputs. It is not the
    opposite of :class:`backpack_core.backpack`, which speaks for the backward pass.
    """

    def __enter__(self) -> disable:
        """Stop recording."""
        _local.disabled = getattr(_local, "disabled", 0) + 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Record again, unless an outer block says otherwise."""
        _local.disabled -= 1


def is_disabled() -> bool:
    """Whether this thread is inside ``disable()``."""
    return getattr(_local, "disabled", 0) > 0


def is_off() -> bool:
    """Whether nothing is recorded; what a checkpoint computes again has to be as it was."""
    return is_disabled() and not is_computed_again()


def is_recording() -> bool:
    """Whether the forward pass under way leaves a graph that a backward pass can be run on."""
    return (
        not torch.compiler.is_compiling()  # first, so that the compiler sees nothing of the rest
        and torch.is_grad_enabled()
        and peek_transform() is None
        and tracing_state() is None
        and not is_off()
    )
