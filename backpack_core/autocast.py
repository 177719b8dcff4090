"""The precision that values are computed in. Imports ``_torch`` only."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from backpack_core._torch import casts

# Kinds of devices that torch may cast on.
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_NOTHING = nullcontext()


def without_autocast() -> AbstractContextManager[object]:
    """A block in which operations compute in the precision of their operands."""
    if not casts():
        return _NOTHING
    stack = ExitStack()
    for device in filter(torch.is_autocast_enabled, _DEVICES):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
