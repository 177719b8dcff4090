"""The dyed gradient, what is asked of it, and what it means where it is not as it should be."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_core.contract.columns import Columns, Root
from backpack_core.engine.weights import Positions, Weights
from backpack_core.errors import SampleMixingError, UnsupportedError

OF_LOSS = Root("dyed behind an extended loss")
# Torch's own formulas may have constants in single precision (CELU, Hardsigmoid).
_SINGLE = 1e-5


class Question(NamedTuple):
    """What has to be known of a pass.

    Attributes:
        is_per_sample: Whether samples stay apart: quantities belong to single ones.
        is_curvature: Whether autograd brings what is known of, and nothing besides.
        is_of_losses: Whether that comes from extended losses alone.
    """

    is_per_sample: bool
    is_curvature: bool
    is_of_losses: bool


class Dye(NamedTuple):
    """The dyed gradient at a tensor.

    Attributes:
        columns: Blocks of columns ``[V, N, *]``: the gradient, and weighted ones.
        is_whole: Whether it came through every operation on the way.
        positions: How many entries of axis 0 each sample has of what calls send here besides, as
            autograd's gradient tells; zero if they send nothing.
        axis: Where samples lie in that, if operations have moved them.
        size: The largest entry it had at the calls that it comes from.
        unit: The coarsest rounding unit on the way.
        way: Calls and operations that it came through.
        brought: What autograd has brought, at a node that it is at.
    """

    columns: Columns
    is_whole: bool = True
    positions: int = 0
    axis: int = 0
    size: float = 0.0
    unit: float = 0.0
    way: tuple[str, ...] = ()
    brought: Tensor | None = None

    def total(self) -> Tensor | None:
        """The sum of all blocks; ``None`` where there are none, or more than that arrived."""
        blocks = [*self.columns.blocks.values()] if self.is_whole else []
        return sum(blocks[1:], blocks[0]) if blocks else None

    @property
    def is_told(self) -> bool:
        """Whether autograd's gradient is all that there is, as what calls sent."""
        return bool(self.positions) and self.is_whole and not self.columns.blocks


LOST = Dye(Columns({}), is_whole=False)
# Where samples are kept apart, the dye need not go, but comes out at the other end.
OPEN = Dye(Columns({}), positions=1)


def history(dyes: Iterable[Dye]) -> Dye:
    """What is known of the ways of several, without their columns."""
    dyes = [*dyes]
    positions = {0, *(dye.positions for dye in dyes)}
    return Dye(
        Columns({}),
        all(dye.is_whole for dye in dyes) and len(positions) < 3,
        max(positions),
        max(dye.axis for dye in dyes),  # others only where axis 0 is not as long
        max(dye.size for dye in dyes),
        max(dye.unit for dye in dyes),
        tuple(dict.fromkeys(step for dye in dyes for step in dye.way)),
    )


class Judge:
    """Compares columns with each other, and with what autograd brings."""

    def __init__(self, weights: Weights, guesses: int, question: Question) -> None:
        """Begin with all guesses, of which one has to be right everywhere."""
        self._weights = weights
        self._question = question
        self._right = {*range(guesses)}

    def compare(self, where: str, arrived: Dye, own: Tensor | None, positions: Positions) -> bool:
        """Compare; false if there is nothing that could be, or all is zero.

        Args:
            where: For messages.
            arrived: What came, dyed.
            own: What autograd brought; ``None`` where that is of another tensor.
            positions: How many entries of axis 0 each sample has; zero where that is unknown; or
                which.

        Raises:
            SampleMixingError: Samples influence each other on the way.
            UnsupportedError: The gradient is not what is known of.
        """
        total = arrived.total()
        assert total is not None
        plain, *guesses = total
        own = own if self._question.is_curvature else None
        size = max(largest(t) for t in (plain, own) if t is not None)
        if not size:
            return False
        units = [torch.finfo(t.dtype).eps for t in (plain, own) if t is not None]
        unit = max(arrived.unit, *units)
        allowed = max(size * unit**0.6, arrived.size * unit * 64)
        besides = 0.0
        if own is not None and not arrived.positions:
            besides = largest(plain - own) / max(16, size * _SINGLE / allowed)
        if self._question.is_of_losses:
            of_loss = arrived.columns.blocks.get(OF_LOSS)
            other = plain if of_loss is None else plain - of_loss[0]
            besides = max(besides, largest(other))
        if besides > allowed:
            raise _something_besides(where, arrived)
        if self._question.is_per_sample and self._weights.fit(plain, positions):
            weights = self._weights.along(plain, positions=positions)
            # Of entries that are much smaller than others, too: but what cancels in sums over
            # samples leaves rounding of the largest.
            rounding = min(allowed, max(size, arrived.size) * unit * 64)
            bounds = (plain.abs() * unit**0.6).clamp(rounding, allowed)
            over = ((n, (g / weights).sub_(plain).abs() - bounds) for n, g in enumerate(guesses))
            self._right &= {n for n, excess in over if not bool((excess > 0).any())}
            if not self._right:
                raise _mixed(where, arrived)
        return True

    def axis(self, dye: Dye) -> int:
        """Where samples lie; another axis than the first only if that is as long as well."""
        total = dye.total()
        if total is None:
            return 0
        plain, *guesses = total
        allowed = largest(plain) * torch.finfo(plain.dtype).eps ** 0.6
        for axis, length in enumerate(plain.shape):
            if length == len(self._weights):
                expected = plain * self._weights.along(plain, axis)
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
    low, high = tensor.aminmax()  # in one go; what is not finite is rare
    found = float(torch.maximum(-low, high))
    return found if isfinite(found) else float(tensor.abs().nan_to_num(0, 0, 0).max())


def _between(where: str, arrived: Dye, most: int = 8) -> str:
    way = arrived.way if len(arrived.way) <= most else (*arrived.way[: most - 1], "...")
    return f"Between {where} ({', '.join(way)})"


def _mixed(where: str, arrived: Dye) -> SampleMixingError:
    """Weights of samples are not those that they started with."""
    return SampleMixingError(
        f"{_between(where, arrived)}, samples of the batch influence each other: a gradient of one "
        "sample reaches another one, or axis 0 holds something else there that is as long as the "
        "batch. Quantities of single samples do not exist. Look for an operation over axis 0; "
        "every module has to receive its samples there, or extend(model, batch_axis=...) to say "
        "where they are. (This is measured: see docs/checks.md.)"
    )


def _something_besides(where: str, arrived: Dye) -> UnsupportedError:
    """Autograd's gradient is another than what came from extended losses."""
    return UnsupportedError(
        f"{_between(where, arrived)}, autograd brings another gradient than that of the extended "
        "losses: a term beside them depends on the output, or a hook changes gradients on the way. "
        "Curvature would be that of something else. Extend the loss as a whole, compute the other "
        "term's in a backward pass of its own, or remove the hook."
    )
