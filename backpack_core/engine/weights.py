"""The weights of samples, and where in a tensor samples may lie."""

from __future__ import annotations

import torch
from torch import Tensor

# How many different weights there are; in a larger batch, some samples share one, others each time.
_LEVELS = 9
Positions = int | Tensor  # how many each sample has on an axis, or which, [N, R]


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

    def fit(self, tensor: Tensor, positions: Positions = 1, axis: int = 0) -> bool:
        """Whether an axis has so many positions of every sample, or those, ``[N, R]``."""
        count = positions * len(self) if isinstance(positions, int) else positions.shape[1]
        return tensor.shape[axis : axis + 1] == (count,)

    def along(self, tensor: Tensor, axis: int = 0, positions: Positions = 1) -> Tensor:
        """One for each entry of an axis, to be multiplied with the tensor."""
        if isinstance(positions, int):
            values = self._values.repeat_interleave(positions)
        else:
            values = self._values.to(positions.device) @ positions.to(self._values.dtype)
        return self._shaped(values, tensor, axis)

    def plain(self, tensor: Tensor) -> Tensor:
        """Columns without weights."""
        return tensor.expand(1 + self._guesses, *tensor.shape)

    def dyed(self, tensor: Tensor, positions: Positions = 1, axis: int = 0) -> Tensor:
        """Columns of a tensor with samples on an axis."""
        columns = tensor.new_empty(1 + self._guesses, *tensor.shape)
        columns[0] = tensor
        columns[1:] = tensor * self.along(tensor, axis, positions)
        return columns

    def guess(
        self, tensor: Tensor, is_first: bool, owners: Tensor | None = None
    ) -> list[Tensor] | None:
        """Where samples may lie in a tensor: weights to multiply with, for every guess.

        Args:
            tensor: Shape ``[*]``.
            is_first: Whether they are on axis 0, if that is as long as the batch.
            owners: Which sample each entry of axis 0 belongs to, if that is known.

        Returns:
            As many as there are guesses, or none if there would have to be more; ``None`` if there
            are no samples in it, as far as its axes tell.
        """
        size = len(self)
        if not size or (tensor.numel() == 1 and size != 1):
            return None
        if owners is not None:
            values = self._values[owners.to(self._values.device)]
            return [self._shaped(values, tensor, 0)] * self._guesses
        axes = [axis for axis, n in enumerate(tensor.shape) if n == size]
        found = [self.along(tensor, axis) for axis in axes[: 1 if is_first else None]]
        if tensor.dim() and not tensor.shape[0] % size and 0 not in axes:  # [N · k, *], [k · N, *]
            count = tensor.shape[0] // size
            rows = self._values.repeat_interleave(count), self._values.repeat(count)
            merged = [self._shaped(values, tensor, 0) for values in rows]
            # Another axis, the classes, may be as long.
            found = merged if is_first or not found else [*found, merged[0]]
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
