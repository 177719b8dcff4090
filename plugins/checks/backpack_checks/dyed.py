"""The quantity of the dye: columns with random weights of samples, and how they are compared.

``dye.py`` says where it goes; this file, what a comparison means.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_core.errors import SampleMixingError, UnsupportedError
from backpack_products.columns import Columns, Root
from backpack_products.values import rounding_unit

# Gradients of extended losses: without samples, and once they got some.
IN_LOSS, OF_LOSS = Root("in an extended loss"), Root("dyed behind an extended loss")
# Some formulas of torch have constants in single precision (CELU, Hardsigmoid).
_SINGLE = 1e-5
# The largest relative difference that counts as rounding in any precision.
_COARSEST = 0.06
# The number of different weights. In a larger batch some samples share one, in each pass others.
_LEVELS = 9
Positions = int | Tensor  # how many each sample has on an axis, or which, [N, R]


class Question(NamedTuple):
    """What a pass has to show, which depends on the extensions.

    Attributes:
        is_per_sample: Whether samples have to stay apart, since quantities belong to single ones.
        is_curvature: Whether autograd has to bring what the dye has seen, and nothing besides.
        is_of_losses: Whether all of it has to come from extended losses.
    """

    is_per_sample: bool
    is_curvature: bool
    is_of_losses: bool


class Dye(NamedTuple):
    """The dyed gradient at a tensor, as far as it is known.

    Attributes:
        columns: Blocks of columns ``[V, N, *]``: the gradient, and the weighted ones.
        is_whole: Whether no part of it was lost at an operation on the way.
        positions: If calls send something here that only autograd's gradient shows: how many
            entries of axis 0 each sample has in it; else zero.
        size: The largest entry at the calls that it comes from.
        unit: The coarsest rounding unit on the way.
        way: The calls and operations that it came through, for messages.
        brought: Autograd's gradient at the node that it has reached.
    """

    columns: Columns
    is_whole: bool = True
    positions: int = 0
    size: float = 0.0
    unit: float = 0.0
    way: tuple[str, ...] = ()
    brought: Tensor | None = None

    def total(self) -> Tensor | None:
        """The sum of all blocks; ``None`` if there are none, or if a part was lost."""
        blocks = [*self.columns.blocks.values()] if self.is_whole else []
        return sum(blocks[1:], blocks[0]) if blocks else None

    @property
    def is_told(self) -> bool:
        """Whether calls sent all of it, so that autograd's gradient is the whole."""
        return bool(self.positions) and self.is_whole and not self.columns.blocks


LOST = Dye(Columns({}), is_whole=False)
# Where quantities are kept apart, the dye need not go: it starts again at the other end.
OPEN = Dye(Columns({}), positions=1)


def history(dyes: Iterable[Dye]) -> Dye:
    """What several dyes that meet have in common, without their columns."""
    dyes = [*dyes]
    positions = {0, *(dye.positions for dye in dyes)}
    return Dye(
        Columns({}),
        all(dye.is_whole for dye in dyes) and len(positions) < 3,
        max(positions),
        max(dye.size for dye in dyes),
        max(dye.unit for dye in dyes),
        tuple(dict.fromkeys(step for dye in dyes for step in dye.way)),
    )


class Weights:
    """A random power of two for each sample, which changes no mantissa and so no rounding.

    If the layout of a tensor is not known, there are several guesses. Each is a weighted column,
    and one of them has to turn out right.

    Attributes:
        guesses: How many guesses there are.
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
        self.guesses = guesses

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._values)

    def fit(self, tensor: Tensor, positions: Positions = 1) -> bool:
        """Whether axis 0 has that many positions of each sample, or those, ``[N, R]``."""
        count = positions * len(self) if isinstance(positions, int) else positions.shape[1]
        return tensor.shape[:1] == (count,)

    def along(self, tensor: Tensor, axis: int = 0, positions: Positions = 1) -> Tensor:
        """The weights of the entries of an axis, shaped to multiply the tensor."""
        if isinstance(positions, int):
            values = self._values.repeat_interleave(positions)
        else:
            values = self._values.to(positions.device) @ positions.to(self._values.dtype)
        return self._shaped(values, tensor, axis)

    def plain(self, tensor: Tensor) -> Tensor:
        """A tensor in all columns, without weights."""
        return tensor.expand(1 + self.guesses, *tensor.shape)

    def dyed(self, tensor: Tensor, positions: Positions = 1) -> Tensor:
        """Columns of a tensor that has samples on axis 0."""
        columns = tensor.new_empty(1 + self.guesses, *tensor.shape)
        columns[0] = tensor
        columns[1:] = tensor * self.along(tensor, positions=positions)
        return columns

    def guess(
        self, tensor: Tensor, is_first: bool, owners: Tensor | None = None
    ) -> list[Tensor] | None:
        """Weights to multiply a tensor with, one for each guess of where its samples lie.

        There may be none, if more guesses would be needed than there are.

        Args:
            tensor: Shape ``[*]``.
            is_first: Whether samples are known to be on axis 0, if that is as long as the batch.
            owners: The sample of each entry of axis 0, if that is known.

        Returns:
            As many as there are guesses, or none if there would have to be more; ``None`` if there
            are no samples in it, as far as its axes tell.
        """
        size = len(self)
        if owners is not None and tensor.dim():
            values = self._values[owners.to(self._values.device)]
            return [self._shaped(values, tensor, 0)] * self.guesses
        if not size or (tensor.numel() == 1 and size != 1):
            return None
        axes = [axis for axis, n in enumerate(tensor.shape) if n == size]
        found = [self.along(tensor, axis) for axis in axes[: 1 if is_first else None]]
        if tensor.dim() and not tensor.shape[0] % size and 0 not in axes:  # [N · k, *], [k · N, *]
            count = tensor.shape[0] // size
            rows = self._values.repeat_interleave(count), self._values.repeat(count)
            # With one sample, both guesses agree. If there is a single one, it is that of the walk.
            most = min(size, self.guesses if is_first else 2)
            merged = [self._shaped(values, tensor, 0) for values in rows[:most]]
            # Another axis (classes) may be as long.
            found = merged if is_first or not found else [*found, merged[0]]
        if not found:
            return None
        if len(found) > self.guesses:
            return []
        return (found * self.guesses)[: self.guesses]

    @staticmethod
    def _shaped(values: Tensor, tensor: Tensor, axis: int) -> Tensor:
        shape = [1] * tensor.dim()
        shape[axis] = -1
        return values.to(tensor.device, tensor.dtype).reshape(shape)


class Judge:
    """Compares columns with each other, and with autograd's gradient, to answer a question."""

    def __init__(self, weights: Weights, question: Question) -> None:
        """Begin with all guesses; one has to be right at every comparison."""
        self.weights = weights
        self.question = question
        self._right = {*range(weights.guesses)}

    def compare(self, where: str, arrived: Dye, own: Tensor | None, positions: Positions) -> bool:
        """Compare; false if there is nothing that could be, or the gradient is zero.

        Where it is, and weighted columns are not, parts of samples have cancelled.

        Args:
            where: The place, for messages.
            arrived: What arrived.
            own: Autograd's gradient; ``None`` if that is of another tensor.
            positions: How many entries of axis 0 each sample has, or which; zero if unknown.

        Raises:
            SampleMixingError: Samples influence each other on the way.
            UnsupportedError: The gradient is not what is known of.
        """
        total = arrived.total()
        assert total is not None
        plain, *guesses = total
        own = own if self.question.is_curvature else None
        size = max(largest(t) for t in (plain, own) if t is not None)
        if not size and not largest(total):
            return False
        units = [rounding_unit(t) for t in (plain, own) if t is not None]
        unit = max(arrived.unit, *units)
        allowed = max(size * unit**0.6, arrived.size * unit * 64)
        besides = 0.0
        if size and own is not None and not arrived.positions:
            besides = largest(plain - own) / max(16, size * _SINGLE / allowed)
        if self.question.is_of_losses:
            blocks = arrived.columns.blocks
            of_losses = [blocks[root][0] for root in (IN_LOSS, OF_LOSS) if root in blocks]
            besides = max(besides, largest(sum(map(torch.neg, of_losses), plain)))
        if besides > allowed:
            raise _something_besides(where, arrived)
        if self.question.is_per_sample and self.weights.fit(plain, positions):
            weights = self.weights.along(plain, positions=positions)
            # Small entries are compared relative to themselves. But sums over samples that cancel
            # leave the rounding of the largest entries. The weights, powers of two, add none.
            rounding = min(allowed, max(size, arrived.size) * min(unit * 64, _COARSEST))
            bounds = (plain.abs() * unit**0.6).clamp(rounding, allowed)
            over = ((n, (g / weights).sub_(plain).abs() - bounds) for n, g in enumerate(guesses))
            self._right &= {n for n, excess in over if not bool((excess > 0).any())}
            if not self._right:
                raise _mixed(where, arrived, is_part=len(plain) < len(self.weights))
        return bool(size)

    def axis(self, dye: Dye) -> int:
        """Where samples lie; another axis than the first only if that is as long as well."""
        total = dye.total()
        if total is None:
            return 0
        plain, *guesses = total
        allowed = largest(plain) * rounding_unit(plain) ** 0.6
        for axis, length in enumerate(plain.shape):
            if length == len(self.weights):
                expected = plain * self.weights.along(plain, axis)
                if any(largest(dyed - expected) <= allowed for dyed in guesses):
                    return axis
        return 0


def largest(tensor: Tensor) -> float:
    """The largest absolute value, of those that are finite."""
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.abs()
    low, high = tensor.aminmax()  # one pass, for the usual case that all are finite
    found = float(torch.maximum(-low, high))
    return found if isfinite(found) else float(tensor.abs().nan_to_num(0, 0, 0).max())


def _between(where: str, arrived: Dye, most: int = 8) -> str:
    way = arrived.way if len(arrived.way) <= most else (*arrived.way[: most - 1], "...")
    return f"Between {where} ({', '.join(way)})"


def _mixed(where: str, arrived: Dye, is_part: bool) -> SampleMixingError:
    """The error if the weights of samples are not those that they started with.

    Args:
        where: What returned the tensor.
        arrived: What came back to it.
        is_part: Whether the tensor has fewer entries than there are samples.
    """
    cause = (
        "probably by an operation over axis 0. Take it over other axes, or say which rows are one "
        "sample (backpack(..., samples=index)) or which axis has the samples (extend(model, "
        "batch_axis=...))."
    )
    if is_part:
        cause = (
            "since rows of one tensor count as different samples, or by an operation over axis 0. "
            "Pass copies (.clone()) of rows that are steps of one sample, and take the operation "
            "over other axes."
        )
    return SampleMixingError(
        f"{_between(where, arrived)}, samples of the batch influence each other, {cause}"
    )


def _something_besides(where: str, arrived: Dye) -> UnsupportedError:
    """The error if autograd's gradient is not what came from the extended losses."""
    return UnsupportedError(
        f"{_between(where, arrived)}, autograd brings another gradient than that of the extended "
        "losses: a term beside them depends on the output, a hook changes gradients on the way, a "
        "parameter got other numbers since the forward pass (model.half(), parameter.data = ...), "
        "or the layer rule of what uses it is wrong. Curvature would be that of something else. "
        "Extend the loss as a whole, compute the other term's in a backward pass of its own, "
        "remove the hook, or run check_case of backpack_core.testing on the rule."
    )
