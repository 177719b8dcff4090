"""The quantity of the dye, columns with random weights of samples, and how it is compared.

``dye.py`` says how the dye travels; this file says what a comparison means.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_core.errors import SampleMixingError, UnsupportedError
from backpack_products.columns import Columns, Root
from backpack_products.contractions import slices
from backpack_products.tuning import CACHE
from backpack_products.values import rounding_unit

# Roots of gradients of extended losses: without samples, and after samples were weighted.
IN_LOSS, OF_LOSS = Root("in an extended loss"), Root("dyed behind an extended loss")
# Some formulas of torch have constants in single precision (CELU, Hardsigmoid).
_SINGLE = 1e-5
# The largest relative difference that counts as rounding, in any precision.
_COARSEST = 0.06
# The number of different weights. In a larger batch samples share them, but different samples in
# each pass.
_LEVELS = 9
# Along each axis, so many entries are looked at before all of them are.
_FEW = 8
Positions = int | Tensor  # how many entries of axis 0 each sample has, or a mask [N, R]


class Question(NamedTuple):
    """What a pass must show, which depends on the extensions.

    Attributes:
        is_per_sample: Whether samples must stay apart, for per-sample quantities.
        is_curvature: Whether autograd's gradient must equal the first column of the dye.
        is_of_losses: Whether all of the gradient must come from extended losses.
    """

    is_per_sample: bool
    is_curvature: bool
    is_of_losses: bool


class Dye(NamedTuple):
    """The gradient and the weighted gradients at a tensor, or the part of them that is known.

    Attributes:
        columns: Blocks of columns ``[V, N, *]``: the gradient, and the weighted gradients.
        is_whole: Whether no part was lost at an operation on the way.
        positions: If calls sent a part that only autograd's gradient shows: how many entries of
            axis 0 each sample has here; else zero.
        size: The largest entry at the calls where the columns started.
        unit: The coarsest rounding unit on the way.
        way: The calls and operations on the way, for messages.
        brought: Autograd's gradient at the node that the dye has reached.
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
        """Whether calls sent all of the gradient, so that autograd's gradient has no other part."""
        return bool(self.positions) and self.is_whole and not self.columns.blocks


LOST = Dye(Columns({}), is_whole=False)
# Behind a call whose products need not be computed, and where columns are kept apart.
OPEN = Dye(Columns({}), positions=1)


def history(dyes: Iterable[Dye]) -> Dye:
    """The combined attributes of dyes that meet, without columns."""
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
    """The random weights of samples: powers of two, which cause no rounding.

    If it is unknown where the samples of a tensor lie, there are several guesses. Each has its own
    weighted column, and one of them must be right everywhere.

    Attributes:
        guesses: The number of guesses.
    """

    def __init__(self, batch_size: int, seed: int, guesses: int) -> None:
        """Draw the weights, with a generator that nothing else uses.

        Args:
            batch_size: Number of samples.
            seed: The seed.
            guesses: The number of guesses: one or two.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(batch_size, generator=generator, device="cpu")
        self._values = 2.0 ** (order % _LEVELS - _LEVELS // 2)
        self.guesses = guesses

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._values)

    def fit(self, tensor: Tensor, positions: Positions = 1) -> bool:
        """Whether axis 0 has the length that the positions of all samples need."""
        count = positions * len(self) if isinstance(positions, int) else positions.shape[1]
        return tensor.shape[:1] == (count,)

    def along(self, tensor: Tensor, axis: int = 0, positions: Positions = 1) -> Tensor:
        """The weights of the entries of an axis, shaped to multiply a tensor."""
        if isinstance(positions, int):
            values = self._values.repeat_interleave(positions)
        else:
            values = self._values.to(positions.device) @ positions.to(self._values.dtype)
        return self._shaped(values, tensor, axis)

    def plain(self, tensor: Tensor) -> Tensor:
        """Columns of a tensor without samples: the same tensor in all of them."""
        return tensor.expand(1 + self.guesses, *tensor.shape)

    def dyed(self, tensor: Tensor, positions: Positions = 1) -> Tensor:
        """Columns of a tensor with samples on axis 0: the tensor, and the weighted tensor."""
        columns = tensor.new_empty(1 + self.guesses, *tensor.shape)
        columns[0] = tensor
        columns[1:] = tensor
        columns[1:].mul_(self.along(tensor, positions=positions))
        return columns

    def guess(
        self, tensor: Tensor, is_first: bool, owners: Tensor | None = None
    ) -> list[Tensor] | None:
        """Weights to multiply a tensor by, for each guess of where its samples lie.

        Args:
            tensor: Shape ``[*]``.
            is_first: Whether samples are on axis 0, if that is as long as the batch.
            owners: The sample of each entry of axis 0, if that is known.

        Returns:
            Weights for each guess; an empty list if there are more possibilities than guesses;
            ``None`` if no axis can hold the samples.
        """
        size = len(self)
        if owners is not None and tensor.dim():
            values = self._values[owners.to(self._values.device)]
            return [self._shaped(values, tensor, 0)] * self.guesses
        if not size or (tensor.numel() == 1 and size != 1):
            return None
        axes = [axis for axis, n in enumerate(tensor.shape) if n == size]
        weights = [self.along(tensor, axis) for axis in axes[: 1 if is_first else None]]
        if tensor.dim() and not tensor.shape[0] % size and 0 not in axes:  # [N · k, *], [k · N, *]
            count = tensor.shape[0] // size
            rows = self._values.repeat_interleave(count), self._values.repeat(count)
            # For one sample, both agree. A single guess is the order that the walk assumes.
            most = min(size, self.guesses if is_first else 2)
            merged = [self._shaped(values, tensor, 0) for values in rows[:most]]
            # Another axis (classes) may be as long as the batch.
            weights = merged if is_first or not weights else [*weights, merged[0]]
        if not weights:
            return None
        if len(weights) > self.guesses:
            return []
        return (weights * self.guesses)[: self.guesses]

    @staticmethod
    def _shaped(values: Tensor, tensor: Tensor, axis: int) -> Tensor:
        shape = [1] * tensor.dim()
        shape[axis] = -1
        return values.to(tensor.device, tensor.dtype).reshape(shape)


class Judge:
    """Compares columns with each other, and with autograd's gradient, to answer a question."""

    def __init__(
        self, weights: Weights, question: Question, is_told: bool = False, is_unread: bool = False
    ) -> None:
        """Begin; the same guess must be right at every comparison.

        Args:
            weights: The weights of samples.
            question: What is asked.
            is_told: Whether an index says which rows are one sample.
            is_unread: Whether a checkpoint keeps an operation from being read.
        """
        self.weights = weights
        self.question, self._is_told, self._is_unread = question, is_told, is_unread
        self._right = {*range(weights.guesses)}

    def compare(self, where: str, arrived: Dye, own: Tensor | None, positions: Positions) -> bool:
        """Compare columns; returns whether the gradient is not zero, so that they show something.

        A zero gradient with nonzero weighted columns means that the parts of samples cancelled.

        Args:
            where: Where they are compared, for messages.
            arrived: The dye that arrived.
            own: Autograd's gradient; ``None`` if it has another shape.
            positions: How many entries of axis 0 each sample has, or a mask; zero if unknown.

        Raises:
            SampleMixingError: Samples influence each other on the way.
            UnsupportedError: Autograd's gradient has a part that the dye does not know.
        """
        total = arrived.total()
        assert total is not None
        plain, *guesses = total
        own = own if self.question.is_curvature else None
        size = max(largest(t) for t in (plain, own) if t is not None)
        floor = _floor(plain)
        if size <= floor and largest(total) <= floor:
            return False
        units = [rounding_unit(t) for t in (plain, own) if t is not None]
        unit = max(arrived.unit, *units)
        allowed = max(size * unit**0.6, arrived.size * unit * 64, floor)
        besides = 0.0
        if size and own is not None and not arrived.positions:
            besides = largest(plain - own) / max(16, size * _SINGLE / allowed)
        if self.question.is_of_losses:
            blocks = arrived.columns.blocks
            of_losses = [blocks[root][0] for root in (IN_LOSS, OF_LOSS) if root in blocks]
            besides = max(besides, largest(reduce(torch.sub, of_losses, plain)))
        if besides > allowed:
            raise _something_besides(where, arrived)
        if self.question.is_per_sample and self.weights.fit(plain, positions):
            weights = self.weights.along(plain, positions=positions)
            # Small entries are compared relative to themselves. But where sums over samples cancel,
            # the rounding errors of the largest entries remain. The weights add no rounding.
            rounding = max(size, arrived.size) * min(unit * 64, _COARSEST)
            rounding = min(allowed, max(rounding, floor))
            # In pieces and in place: for logits of a large vocabulary, fresh memory takes longer
            # than arithmetic, and would be the peak of the pass.
            wrong: list[list[Tensor]] = [[] for _ in guesses]
            for rows in slices(len(plain), CACHE // (plain[0].numel() * plain.element_size() or 1)):
                part, by = plain[rows], weights[rows]
                bounds = part.abs().mul_(unit**0.6).clamp_(rounding, allowed)
                for flags, guess in zip(wrong, guesses, strict=True):
                    flags.append(((guess[rows] / by).sub_(part).abs() > bounds).any())
            self._right &= {n for n, flags in enumerate(wrong) if not torch.stack(flags).any()}
            if not self._right:
                if self._is_told:
                    raise _told_otherwise(where, arrived)
                is_part = len(plain) < len(self.weights)
                raise _mixed(where, arrived, is_part, self._is_unread)
        return bool(size)

    def axis(self, dye: Dye) -> int:
        """The axis on which the weighted columns fit; 0 if they fit on none."""
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
    """The largest finite absolute value; zero for an empty tensor."""
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.abs()
    low, high = tensor.aminmax()  # one pass suffices if all entries are finite
    value = float(torch.maximum(-low, high))
    return value if isfinite(value) else float(tensor.abs().nan_to_num(0, 0, 0).max())


def is_zero(columns: Tensor) -> bool:
    """Whether no finite entry of columns ``[V, *]`` differs from zero."""
    few = columns[(slice(_FEW),) * columns.dim()]  # usually, these show it
    return not largest(few) and not largest(columns)


def _floor(tensor: Tensor) -> float:
    """What rounding leaves of any number: below the normal range, steps have a fixed size."""
    found = torch.finfo(tensor.dtype)
    return found.tiny * found.eps * 1024


def _between(where: str, arrived: Dye, most: int = 8) -> str:
    """The stretch of the graph that the dye came through, for messages."""
    way = arrived.way if len(arrived.way) <= most else (*arrived.way[: most - 1], "...")
    return f"Between {where} ({', '.join(way)})"


def _mixed(where: str, arrived: Dye, is_part: bool, is_unread: bool) -> SampleMixingError:
    """The error for weighted columns that are not the weighted gradient.

    Args:
        where: The call or operation that returned the tensor.
        arrived: The dye that arrived.
        is_part: Whether axis 0 of the tensor is shorter than the batch.
        is_unread: Whether a checkpoint keeps an operation from being read.
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
    if is_unread:
        cause = (
            "or rows were picked inside of a checkpoint, where an index cannot be read. Pick them "
            "outside of it, and take operations over axes other than 0."
        )
    return SampleMixingError(
        f"{_between(where, arrived)}, samples of the batch influence each other, {cause}"
    )


def _told_otherwise(where: str, arrived: Dye) -> SampleMixingError:
    """The same, if an index says which rows are one sample: it is probably wrong."""
    return SampleMixingError(
        f"{_between(where, arrived)}, rows influence each other that belong to different samples, "
        "as samples=... of backpack(...) says (users= in private training), or a sum in the model. "
        "First look whether the index names the sample of each row that the model receives, in "
        "their order, and whether the model puts rows of one sample together. If so, an operation "
        "over axis 0 mixes samples: take it over other axes."
    )


def _something_besides(where: str, arrived: Dye) -> UnsupportedError:
    """The error for a gradient of autograd that does not come from the extended losses alone."""
    return UnsupportedError(
        f"{_between(where, arrived)}, autograd brings another gradient than that of the extended "
        "losses, so curvature would be wrong: another term depends on the output, a hook changes "
        "gradients on the way, a parameter got other numbers since the forward pass "
        "(model.half(), parameter.data = ...), or the layer rule of what uses it is wrong. "
        "Extend the whole loss, call backward() on the other term separately, remove the hook, "
        "or run check_case of backpack_core.testing on the rule."
    )
