"""What squares of individual gradients have in common: they leave the range of half precision."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from backpack_core import FirstOrderExtension
from backpack_core.errors import RangeWarning, warn_once
from backpack_core.values import is_symbolic

# Flags on their way from another device: the flag, what tells that it arrived, key and message.
_pending: list[tuple[Tensor, torch.cuda.Event, object, str]] = []


# Numbers smaller than this times the smallest normal one have lost digits.
_MARGIN = 1e7


@cache
def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The smallest number that has all of its digits, and the largest one."""
    numbers = torch.finfo(dtype)
    return numbers.tiny * _MARGIN, numbers.max


class SquaresExtension(FirstOrderExtension):
    """An extension whose values are quadratic in the gradients: in single precision at least."""

    def dtype_for(self, parameter: Tensor) -> torch.dtype:
        """Squares leave the range of half precision."""
        return torch.promote_types(parameter.dtype, torch.float32)


def warn_of_range(norm: Tensor, squares: Tensor, key: object, message: str) -> None:
    """Warn once if a square is infinite or has lost its digits, and the norm is and has not.

    Args:
        norm: Norms, whatever their size.
        squares: Their squares.
        key: For which there is one warning.
        message: The text.
    """
    if is_symbolic(norm):
        return
    lost = (norm > 0) & (squares < torch.finfo(squares.dtype).tiny)
    flag = (lost | (norm.isfinite() & ~squares.isfinite())).any()
    if flag.device.type != "cuda":
        if flag:
            warn_once(key, message, RangeWarning)
        return
    # Without waiting: it is looked at when it has arrived, in a later pass.
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flag.device))
    _pending.append((host, event, key, message))
    warn_of_arrived()


def warn_of_arrived() -> None:
    """Look at the flags that have arrived."""
    arrived = [entry for entry in _pending if entry[1].query()]
    _pending[:] = [entry for entry in _pending if entry not in arrived]
    for host, _, key, message in arrived:
        if host:
            warn_once(key, message, RangeWarning)
