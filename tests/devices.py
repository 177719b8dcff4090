"""``pytest --device cuda``: where the tensors of tests are made."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
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


def everywhere(device: torch.device) -> None:
    """Make tensors there by default, on threads that tests start, too: torch asks each thread.

    Autograd's own threads, which run the hooks of a GPU's graphs, still make them on the host.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for tests that compare bits
    torch.set_default_device(device)
    original = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        torch.set_default_device(device)
        torch.zeros(1)  # from now on the thread has the device's context, which torch warns without
        with DrawnOnHost():
            original(thread)

    threading.Thread.run = run  # type: ignore[method-assign]


def rng_state() -> Tensor:
    """The state of the generators that draw: the host's, and that of the default device."""
    host, device = torch.random.get_rng_state(), torch.get_default_device()
    if device.type == "cpu":
        return host
    return torch.cat([host, getattr(torch, device.type).get_rng_state(device)])


def set_rng_state(state: Tensor) -> None:
    """Set what :func:`rng_state` returned."""
    device, size = torch.get_default_device(), len(torch.random.get_rng_state())
    torch.random.set_rng_state(state[:size])
    if device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state[size:], device)


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
