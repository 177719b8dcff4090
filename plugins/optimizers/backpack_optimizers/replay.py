"""The same random numbers again, for a loss that is compared before and after a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Replay:
    """Stores the states of torch's generators."""

    def __init__(self, device: torch.device) -> None:
        """Store the states.

        Args:
            device: The device of the parameters.
        """
        self._device, self._host = device, torch.get_rng_state()
        is_cuda = device.type == "cuda"
        self._state = torch.cuda.get_rng_state(device) if is_cuda else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block that repeats the draws since then; afterwards, generators continue."""
        with torch.random.fork_rng([] if self._state is None else [self._device]):
            torch.set_rng_state(self._host)
            if self._state is not None:
                torch.cuda.set_rng_state(self._state, self._device)
            yield
