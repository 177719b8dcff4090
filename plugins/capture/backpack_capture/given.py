"""The arguments of a step: the tensors among them, and what distinguishes them from others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from backpack_capture import _torch
from backpack_capture.engine import Asked
from backpack_products.values import kernels_of


def plain_tensors(args: tuple[Any, ...]) -> list[Tensor] | None:
    """Arguments that are different tensors; ``None`` if they are not."""
    for arg in args:
        if type(arg) is not Tensor:
            return None
    return [*args] if len({*map(id, args)}) == len(args) else None


def key_of(tensor: Tensor) -> Hashable:
    """Everything about tensors except their numbers."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        kernels_of(tensor),
        type(tensor),
    )


def reason_against(asked: Asked, given: Sequence[Tensor]) -> str | None:
    """Why steps with such arguments are not recorded."""
    if asked.check == "always":
        return 'check="always" measures every pass'
    for tensor in given:
        if type(tensor) is not Tensor:
            return f"an argument is a {type(tensor).__name__}"
        if _torch.is_foreign(tensor):
            return (
                f"an argument is on {tensor.device}, {tensor.layout}: only dense tensors on a CPU "
                "or on the current CUDA device are recorded"
            )
        if tensor.requires_grad:
            return "an argument requires a gradient"
    return None


def shown_of(given: Sequence[Tensor]) -> str:
    """Types and shapes, for a report."""
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in given]
    return ", ".join(shown) or "no tensors"
