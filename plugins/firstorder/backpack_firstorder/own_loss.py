"""A sample's own loss: its term of the loss without the divisor and without extra factors."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import inf, isclose, nan
from numbers import Real
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import Normaliser
from backpack_core.errors import UsageError
from backpack_products.merging import OverBatches
from backpack_products.values import is_symbolic

Told: TypeAlias = Normaliser | Literal["loss"]
TOLERANCE = 1e-6  # relative, of two normalisers that are the same

UNLESS_TOLD = (
    "Say it: ClippedSumGrad(..., normaliser=len(targets)) for a mean over samples, "
    "normaliser=None for a sum. Or call backward() on an extended loss, or a weighted sum of "
    "extended losses."
)


class OfOwnLosses(OverBatches):
    """Values add up over batches. Over a data set, the loss of each batch may be a function."""

    def of_batch(self, extension: Extension, normaliser: float | None) -> Extension:
        """The extension that knows what the loss of a batch divides by."""
        if not extension.needs_normalisers:
            return extension
        copied = copy(extension)
        cast(Any, copied).normaliser = normaliser
        return copied


def factor_of(
    scale: float, told: Told, normalisers: Sequence[Normaliser], is_measured: bool = True
) -> float | Tensor:
    """The factor in front of ``Σ_n ℓ_n``: the scale, divided by the normaliser.

    Args:
        scale: The number that the loss was multiplied by.
        told: The divisor that the user gave.
        normalisers: The divisor of each loss of the pass.
        is_measured: Whether to wait for a device to tell whether the divisors differ. If not, the
            factor is NaN there if they do.

    Raises:
        UsageError: The losses divide by several numbers, or no extended loss took part.
    """
    divisors = normalisers if isinstance(told, str) else [told]
    numbers = [1.0 if number is None else number for number in divisors]
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    if tensors and len(numbers) > 1:
        common, are_one = _common(numbers, tensors[0])
        if is_symbolic(common) or not (is_measured or common.is_cpu):
            return scale / torch.where(are_one, common, nan)
        if are_one:
            return scale / common
    elif numbers and all(isclose(n, numbers[0], rel_tol=TOLERANCE) for n in numbers[1:]):
        return scale / numbers[0]
    why = "no extended loss took part"
    if numbers:
        shown = [f"{number:g}" for number in sorted({float(number) for number in numbers})]
        why = f"its losses divide by {' and by '.join(shown)}"
    raise UsageError(
        f"ClippedSumGrad needs to know what the loss divides by, and {why}. {UNLESS_TOLD}"
    )


def check_normaliser(told: Any) -> Told:
    """Check a ``normaliser`` argument and return it.

    Raises:
        UsageError: It is not a positive, finite number, ``None`` or ``"loss"``.
    """
    if told is None or (isinstance(told, str) and told == "loss"):
        return cast(Told, told)
    if not is_number(told) or not 0 < told < inf:
        raise UsageError(
            "normaliser must be what the loss divides by: a positive and finite number, None for a "
            f'sum, or "loss" for what the extended losses say. Got {told!r}.'
        )
    return cast(Told, told)


def is_number(value: object) -> bool:
    """Whether an argument is a number, or a tensor with one."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def _common(numbers: Sequence[float | Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """The first of several normalisers, and whether all others are equal to it."""
    every = torch.stack([like.new_zeros(()) + number for number in numbers])
    return every[0], ((every - every[0]).abs() <= TOLERANCE * every[0].abs()).all()
