"""Watches what passes leave behind: buffers, and runs of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core.errors import UsageError
from backpack_privacy.refusals import is_half


class Buffers:
    """Watches whether a pass changes buffers of a model: these would hold data without noise."""

    def __init__(self, model: nn.Module, public: Collection[str]) -> None:
        """Store what is watched.

        Args:
            model: The model.
            public: Names of buffers that may change.

        Raises:
            UsageError: It is one string, or the model has no buffer of that name.
        """
        names = [name for name, _ in model.named_buffers()]
        unknown = [public] if isinstance(public, str) else [n for n in public if n not in names]
        if unknown:
            raise UsageError(
                "public_buffers= must be a list of names of the model's buffers: "
                f"{', '.join(names) or 'there are none'}. Got {unknown[0]!r}."
            )
        self._model, self._public = model, frozenset(public)
        # The tensor, its version at the last comparison (-1: not yet), and its first values.
        self._known: dict[str, tuple[Tensor, int, Tensor]] | None = None

    def begin(self) -> None:
        """An epoch begins; at the first, store buffers: a checkpoint has been loaded by now."""
        if self._known is None:
            self._known = {name: (found, -1, found.clone()) for name, found in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, b) for n, b in self._model.named_buffers() if n not in self._public)

    def check(self) -> None:
        """Compare the buffers that were written to; the first time, all.

        Raises:
            UsageError: A buffer has changed.
        """
        assert self._known is not None
        for name, found in self._buffers():
            tensor, version, value = self._known.get(name, (None, -1, None))
            new = -1 if found.is_inference() else found._version
            if found is tensor and new == version != -1:
                continue
            if value is None or not torch.equal(value.to(found), found):
                raise UsageError(
                    f"The forward pass changed the buffer {name}. If it depends on the data, it "
                    "would be published without noise: make the layer leave it alone in train "
                    "mode. If it does not (a counter, an estimate from weights), say so by "
                    f"make_private(..., public_buffers=[{name!r}])."
                )
            self._known[name] = (found, new, value)


class Forwards:
    """Counts the runs of a model that a backward pass goes through, and checks their precision.

    Attributes:
        handles: Handles that remove the hooks.
        only_looks: Tells ``capture`` that its hooks do not change what a step computes.
    """

    only_looks = True

    def __init__(self, model: nn.Module) -> None:
        """Install hooks on a model, and on the modules that own trained parameters."""
        self._model, self._is_cast = model, False
        self._runs, self._reached = 0, set[int]()
        self.handles = [model.register_forward_hook(self._on_forward)]
        for module in model.modules():
            own = next((p for p in module.parameters(recurse=False) if p.requires_grad), None)
            if own is not None:  # models may turn autocast on in their forward()
                hook = partial(self._on_layer, own.device.type)
                self.handles.append(module.register_forward_hook(hook))

    def _on_layer(self, device: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device):
            self._is_cast |= is_half(torch.get_autocast_dtype(device))

    def _on_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._runs += 1
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, self._runs))

    def _on_gradient(self, run: int, gradient: Tensor) -> None:
        self._reached.add(run)

    def begin(self) -> None:
        """A backward pass begins; the runs of earlier passes do not count."""
        self._reached = set()

    def end(self, is_mean: bool) -> None:
        """A backward pass has finished.

        Args:
            is_mean: Whether its loss divides by a number that depends on the batch.

        Raises:
            UsageError: The pass went through several runs of the model, or through none; or its
                loss is a mean in half precision.
        """
        is_cast, self._is_cast = self._is_cast, False
        _check_count(len(self._reached))
        if is_mean and (is_cast or _has_half(self._model)):
            raise UsageError(
                "The loss is a mean over the batch, in half precision. So the number of samples "
                "changes the rounding of every sample's gradient, and the bound on one sample does "
                'not cover this. Use a sum, reduction="sum" or normaliser=None: private gradients '
                "are the same."
            )


def _has_half(model: nn.Module) -> bool:
    tensors = chain(model.parameters(), model.buffers())
    return any(is_half(tensor.dtype) for tensor in tensors)


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors in an output, including those in containers."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)
    elif is_dataclass(output):
        yield from _tensors(vars(output))


def _check_count(count: int) -> None:
    if not count:
        raise UsageError(
            "The backward pass went through no run of the model, so it is not known whether its "
            "rows are those of the batch. Call the model itself, model(inputs), not its layers; if "
            "it is compiled, give make_private(...) what torch.compile returned. It must return "
            "tensors, or tuples, lists, dictionaries or dataclasses of them."
        )
    if count > 1:
        raise UsageError(
            f"The backward pass went through {count} runs of the model, and the first samples of "
            "all runs would count as one. Give the model everything in one batch. If several rows "
            "belong to one sample, name that sample by users=."
        )
