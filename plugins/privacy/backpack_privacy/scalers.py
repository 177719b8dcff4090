"""Gradient scalers, which step an optimizer themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.optim import Optimizer

from backpack_core.errors import UsageError

# What a scaler tells a fused optimizer, for one step.
SCALED = frozenset({"grad_scale", "found_inf"})
# An attribute of fused optimizers. A scaler then leaves gradients to the optimizer, and calls it.
_LEAVES_THEM = "_step_supports_amp_scaling"


class Scalers:
    """Refuses a scaler that steps by hand, since there are no gradients when it looks at them.

    Private gradients are made in the step. A scaler looks at gradients before it, and would raise
    an error of its own, unless the optimizer says that it looks by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Make scalers call the optimizer."""
        self._attributes = vars(optimizer)
        self._own = self._attributes.get(_LEAVES_THEM)
        self._attributes[_LEAVES_THEM] = True

    @contextmanager
    def stepping(self, scaler: Any) -> Iterator[None]:
        """A block in which a scaler steps the optimizer, whose gradients are in place."""
        self.close()
        try:
            yield
        except BaseException:
            with suppress(AssertionError):  # gradients were not divided by the scale so far
                scaler.update()  # otherwise the next ones would not be divided, or twice
            self._forget()
            raise
        finally:
            self._attributes[_LEAVES_THEM] = True

    def check(self) -> None:
        """Refuse a step that a scaler takes by itself.

        Raises:
            UsageError: A scaler takes the step.
        """
        if self._attributes.keys() >= SCALED:
            self._forget()
            raise UsageError(
                "A gradient scaler steps the optimizer, scaler.step(optimizer), but has not seen "
                "the private gradients, which are made in the step. Write private.step(loss, "
                "scaler=scaler), which also keeps the scale out of the clipped sums; or compute in "
                "bfloat16, which needs no scaler."
            )

    def close(self) -> None:
        """Make scalers treat the optimizer as before."""
        if self._own is None:
            self._attributes.pop(_LEAVES_THEM, None)
        else:
            self._attributes[_LEAVES_THEM] = self._own

    def _forget(self) -> None:
        for name in SCALED:
            self._attributes.pop(name, None)
