"""``pytest --device cuda``: where the tensors of tests are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

_DRAW = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}


def usable(name: str) -> torch.device:
    """The device of a name.

    Raises:
        pytest.UsageError: There is none, or it has no numbers.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise pytest.UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "cpu":
        return device
    if device.type == "meta":
        raise pytest.UsageError("--device meta: its tensors have no numbers to compare")
    module: Any = getattr(torch, device.type, None)
    if module is None or not module.is_available():
        raise pytest.UsageError(f"--device {name}: torch {torch.__version__} finds no such device")
    return device


class DrawnOnHost(TorchFunctionMode):
    """What is drawn by a generator of the host is drawn there, and moved to the default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at functions that draw, let others pass."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if func not in _DRAW or generator is None or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        drawn = func(*args, **kwargs, device=generator.device)
        return drawn.to(torch.get_default_device())
