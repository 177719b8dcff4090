"""Questions about the numbers in a tensor that have an answer for tensors without numbers, too.

Tensors of ``FakeTensorMode`` and of the device ``meta`` have a shape only. Whoever plans memory
with them wants shapes, and no error about values. Imports ``_torch`` only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from backpack_core._torch import casts
from backpack_core._torch import is_symbolic as is_symbolic
from backpack_core._torch import memory_of as memory_of

# Kinds of devices that torch may cast on.
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_NOTHING = nullcontext()


def any_of(mask: Tensor) -> bool:
    """Whether any entry of a mask is true; false for a tensor without values."""
    return not is_symbolic(mask) and bool(mask.any())


def without_autocast() -> AbstractContextManager[object]:
    """A block in which operations compute in the precision of their operands."""
    if not casts():
        return _NOTHING
    stack = ExitStack()
    for device in filter(torch.is_autocast_enabled, _DEVICES):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
