"""The dyed gradient, what is asked of it, and what it means where it is not as it should be."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_core.contract.columns import Columns
from backpack_core.errors import SampleMixingError, UnsupportedError


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
        size: The largest entry it had at the calls that it comes from.
        unit: The coarsest rounding unit on the way.
        way: Calls and operations that it came through.
        brought: What autograd has brought, at a node that it is at.
    """

    columns: Columns
    is_whole: bool = True
    positions: int = 0
    size: float = 0.0
    unit: float = 0.0
    way: tuple[str, ...] = ()
    brought: Tensor | None = None

    def total(self) -> Tensor | None:
        """The sum of all blocks."""
        blocks = list(self.columns.blocks.values())
        return sum(blocks[1:], blocks[0]) if blocks else None


LOST = Dye(Columns({}), is_whole=False)
# Where samples are kept apart, the dye need not go, but comes out at the other end.
OPEN = Dye(Columns({}), positions=1)


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


def unit_of(columns: Columns) -> float:
    """The rounding unit of the coarsest block."""
    return max((torch.finfo(b.dtype).eps for b in columns.blocks.values()), default=0.0)


def _listed(way: Iterable[str], most: int = 8) -> str:
    steps = list(way)
    return ", ".join(steps if len(steps) <= most else [*steps[: most - 1], "..."])


def mixed(where: str, arrived: Dye) -> SampleMixingError:
    """The error where weights of samples are not those that they started with."""
    return SampleMixingError(
        f"Between {where} ({_listed(arrived.way)}), samples of the batch influence each "
        "other: a gradient of one sample reaches another one, or axis 0 holds something else there "
        "that is as long as the batch. Quantities of single samples do not exist. Look for an "
        "operation over axis 0; "
        "every module has to receive its samples there. (This is measured: see docs/checks.md.)"
    )


def something_besides(where: str, arrived: Dye) -> UnsupportedError:
    """The error where autograd's gradient is another than what came from extended losses."""
    return UnsupportedError(
        f"Between {where} ({_listed(arrived.way)}), autograd brings another gradient than that of "
        "the extended losses: a term beside them depends on the output, or a hook changes "
        "gradients on the way. Curvature would be that of something else. Extend the loss as a "
        "whole, compute the other term's in a backward pass of its own, or remove the hook."
    )
