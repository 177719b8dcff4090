"""What passes leave behind is watched: buffers, and runs of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core.errors import UsageError


class Buffers:
    """Watches whether a pass changes buffers of a model: these would hold data without noise."""

    def __init__(self, model: nn.Module, public: tuple[str, ...]) -> None:
        """Remember what buffers have.

        Args:
            model: The model.
            public: Names of buffers that may change.
        """
        self._model, self._public = model, public
        # The tensor, its version when it was compared (-1: not yet), and what it had at first.
        self._known = {name: (found, -1, found.clone()) for name, found in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, b) for n, b in self._model.named_buffers() if n not in self._public)

    def check(self) -> None:
        """Compare those that were written to; the first time, all.

        Raises:
            UsageError: One has changed.
        """
        for name, found in self._buffers():
            tensor, version, value = self._known.get(name, (None, -1, None))
            new = -1 if found.is_inference() else found._version
            if found is tensor and new == version != -1:
                continue
            if value is None or not torch.equal(value.to(found), found):
                raise UsageError(
                    f"The forward pass changed the buffer {name}. If it depends on the data, it "
                    "would be published without noise: make the layer leave it alone in train "
                    "mode. If it does not (a counter, an estimate from weights), say so, "
                    f"make_private(..., public_buffers=[{name!r}])."
                )
            self._known[name] = (found, new, value)


class Forwards:
    """Counts the runs of a model that a backward pass goes through.

    Attributes:
        handle: Takes the hook out.
    """

    def __init__(self, model: nn.Module) -> None:
        """Install a hook on a model."""
        self._runs, self._reached = 0, set[int]()
        self.handle = model.register_forward_hook(self._on_forward)

    def _on_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._runs += 1
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, self._runs))

    def _on_gradient(self, run: int, gradient: Tensor) -> None:
        self._reached.add(run)

    def taken(self) -> int:
        """How many were reached since this was asked last."""
        found, self._reached = len(self._reached), set()
        return found


def _tensors(output: Any) -> Iterator[Tensor]:
    """All that is in an output, in containers, too."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)


def check_forwards(count: int) -> None:
    """Raise unless one run of the model went backward.

    Raises:
        UsageError: Several did.
    """
    if count > 1:
        raise UsageError(
            f"The backward pass went through {count} runs of the model, and the first samples of "
            "all runs would count as one. Give the model one batch with everything; if its rows "
            "belong to one sample, name that sample by users=."
        )
