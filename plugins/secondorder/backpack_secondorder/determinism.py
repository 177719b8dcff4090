"""Checks that several passes over a loader see the same data and the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from backpack_core.errors import UsageError


def require_deterministic(model: Module) -> None:
    """Raise an error if a module is random, or if a forward pass changes its statistics.

    Raises:
        UsageError: A dropout or batch normalisation is in train mode.
    """
    for name, module in model.named_modules():
        is_random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (is_random or isinstance(module, _BatchNorm)):
            raise UsageError(
                f"A matrix over a data set needs the same function in every pass, but {name!r}, "
                f"{type(module).__name__}, is in train mode: call model.eval()."
            )


class Passes:
    """Compares the losses of each pass with those of the first one.

    Attributes:
        in_order: Whether batches must also come in the same order. If not, only the sums of the
            losses are compared.
    """

    def __init__(self, parameters: Sequence[Tensor], in_order: bool) -> None:
        """Begin without a first pass.

        Args:
            parameters: When these change, the next pass counts as the first one.
            in_order: See the class.
        """
        self._parameters, self.in_order = parameters, in_order
        self._known: tuple[tuple[int, ...], Tensor] | None = None

    @contextmanager
    def one(self) -> Iterator[Callable[[Tensor], None]]:
        """The context of one pass: a function to be called with the loss of every batch.

        Raises:
            UsageError: The losses differ from those of the first pass, or the loader gave no batch.
        """
        losses: list[Tensor] = []
        yield losses.append
        if not losses:
            raise UsageError(
                "The loader gave no batch with a sample that counts: pass something that can be "
                "iterated several times, such as a DataLoader or a list, with some targets that "
                "are not ignored."
            )
        versions = tuple(p._version for p in self._parameters)
        sums = torch.stack([loss.reshape(()) for loss in losses])
        if not self.in_order:
            sums = sums.sum(0, keepdim=True)
        if self._known is None or self._known[0] != versions:
            self._known = versions, sums
            return
        before = self._known[1]
        bound = 10 * torch.finfo(sums.dtype).eps ** 0.6 * before.abs().max()
        if sums.shape != before.shape or bool((sums - before).abs().max() > bound):
            raise UsageError(
                "Two passes over the loader differ: the losses of the batches "
                f"{'' if self.in_order else 'add up to '}{_text(before)} in the first one, and "
                f"{_text(sums)} now. Take a loader without random augmentation"
                f"{' that does not shuffle' if self.in_order else ''}, and a model without random "
                "numbers."
            )


def _text(losses: Tensor) -> str:
    values = ", ".join(f"{value:.8g}" for value in losses[:3].tolist())
    return f"{values}, …" if len(losses) > 3 else values
