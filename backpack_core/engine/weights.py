"""The weights of samples, and where in a tensor samples may lie."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.graph.owners import Owners

# How many different weights there are; in a larger batch, some samples share one, others each time.
_LEVELS = 9


class Weights:
    """A random power of two for every sample: rounding is the same with it and without.

    Where nobody says how a tensor is laid out, there are several guesses: columns besides the plain
    one, of which one has to turn out right.
    """

    def __init__(self, batch_size: int, seed: int, guesses: int) -> None:
        """Draw them.

        Args:
            batch_size: Number of samples.
            seed: No generator of the user's is touched.
            guesses: How many columns there are for guesses: one or two.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(batch_size, generator=generator, device="cpu")
        self._values = 2.0 ** (order % _LEVELS - _LEVELS // 2)
        self._guesses = guesses

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._values)

    def fit(self, tensor: Tensor, positions: int = 1, axis: int = 0) -> bool:
        """Whether an axis has so many positions of every sample."""
        return tensor.shape[axis : axis + 1] == (positions * len(self),)

    def along(self, tensor: Tensor, axis: int = 0, positions: int = 1) -> Tensor:
        """One for each entry of an axis, to be multiplied with the tensor."""
        values = self._values if positions == 1 else self._values.repeat_interleave(positions)
        return self._shaped(values, tensor, axis)

    def plain(self, tensor: Tensor) -> Tensor:
        """Columns without weights."""
        return tensor.expand(1 + self._guesses, *tensor.shape)

    def dyed(self, tensor: Tensor, positions: int = 1, axis: int = 0) -> Tensor:
        """Columns of a tensor with samples on an axis."""
        columns = tensor.new_empty(1 + self._guesses, *tensor.shape)
        columns[0] = tensor
        columns[1:] = tensor * self.along(tensor, axis, positions)
        return columns

    def guess(
        self, tensor: Tensor, is_first: bool, owners: Owners | None = None
    ) -> list[Tensor] | None:
        """Where samples may lie in a tensor: weights to multiply with, for every guess.

        Args:
            tensor: Shape ``[*]``.
            is_first: Whether they are on axis 0, if that is as long as the batch.
            owners: Whose the entries of axis 0 are, if that is known.

        Returns:
            As many as there are guesses, or none if there would have to be more; ``None`` if there
            are no samples in it, as far as its axes tell.
        """
        size = len(self)
        owned = []
        if owners is not None and tensor.dim():
            values = self._values[owners.rows.to(self._values.device)]
            owned = [self._shaped(values, tensor, 0)]
            if owners.are_sure or tensor.numel() == 1:
                return owned * self._guesses
        if not size or (tensor.numel() == 1 and size != 1):
            return None
        axes = [axis for axis, n in enumerate(tensor.shape) if n == size]
        found = [self.along(tensor, axis) for axis in axes[: 1 if is_first else None]]
        if tensor.dim() and not tensor.shape[0] % size and 0 not in axes:  # [N · k, *], [k · N, *]
            count = tensor.shape[0] // size
            rows = self._values.repeat_interleave(count), self._values.repeat(count)
            merged = [self._shaped(values, tensor, 0) for values in rows]
            # Another axis, the classes, may be as long.
            found = merged if is_first or not found else [*found, merged[0]]
        found += owned[: self._guesses - len(found)]
        if not found:
            return None
        if len(found) > self._guesses:
            return []
        return (found * self._guesses)[: self._guesses]

    @staticmethod
    def _shaped(values: Tensor, tensor: Tensor, axis: int) -> Tensor:
        shape = [1] * tensor.dim()
        shape[axis] = -1
        return values.to(tensor.device, tensor.dtype).reshape(shape)
