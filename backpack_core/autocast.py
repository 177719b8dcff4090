"""Turns autocast off where values are computed in the precision of their operands."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from backpack_core._torch import casts

# The types of devices for which torch has autocast.
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_NOTHING = nullcontext()


def without_autocast() -> AbstractContextManager[object]:
    """A context manager in which autocast is off."""
    if not casts():
        return _NOTHING
    stack = ExitStack()
    for device in filter(torch.is_autocast_enabled, _DEVICES):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
