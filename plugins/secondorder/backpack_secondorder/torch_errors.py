"""Explains torch's errors when a graph is differentiated twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backpack_core.errors import OverwrittenInputError, UnsupportedError, UsageError


@contextmanager
def explained() -> Iterator[None]:
    """Re-raise torch's errors with an explanation."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "modified by an inplace operation" in text:
            raise OverwrittenInputError(
                "Parameters, or tensors of the graph, changed since the backward pass that made "
                "this product: run another one."
            ) from error
        if "does not require grad" in text:
            raise UsageError(
                "Parameters were frozen after the backward pass, but its results differentiate "
                "them: freeze them before the forward pass, or after the products are taken."
            ) from error
        if "cudnn" in text.lower():
            raise UnsupportedError(
                "cuDNN's recurrent layers have no second derivative. Run the forward pass inside "
                "of torch.backends.cudnn.flags(enabled=False)."
            ) from error
        if "double backward" in text:
            raise UnsupportedError(
                "torch.compile compiled the forward pass, and compiled code cannot be "
                "differentiated twice: run the forward pass inside the block of backpack(...), "
                "where compiled code runs as it was written."
            ) from error
        if "derivative for" in text or "not implemented" in text:
            raise UnsupportedError(
                f"An operation of the net has no second derivative ({text.splitlines()[0]}). "
                "Write it with operations that have one: for attention, choose a kernel that has "
                "one by torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the forward pass; "
                "for torch.cdist, write (x[:, None] - y).square().sum(2)."
            ) from error
        raise
