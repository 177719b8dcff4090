"""What losses divide by, compared with what was said: ``normaliser="samples"``, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import isclose
from typing import NamedTuple

import torch

from backpack_core import View
from backpack_core.contract.rules import normaliser_of
from backpack_core.errors import UnsupportedError, UsageError


class Divisor(NamedTuple):
    """What one extended loss divides by.

    Attributes:
        path: Which loss it is.
        number: The divisor; 1 for a sum.
        shape: The shape of what the loss received.
    """

    path: str
    number: float
    shape: torch.Size

    @property
    def may_be_constant(self) -> bool:
        """Whether it may be the same number for each sample, whatever targets and weights are."""
        share = self.number / max(1, self.shape[:1].numel())
        return self.number == 1 or (round(share) > 0 and _are_close(share, round(share)))


class Divisors:
    """Compares the divisors of the losses in all passes.

    An extended loss says what it divides by. If that depends on the samples of a batch, and
    something else was said, a sample that is added changes what all others give. No bound covers
    this.
    """

    def __init__(self) -> None:
        """Nothing is known before the first pass."""
        self._factors: list[float] = []

    def check(self, said: float, divisors: Sequence[Divisor]) -> None:
        """Refuse a number that is not what the losses divide by, up to a constant factor.

        Args:
            said: What was said.
            divisors: What each loss of a pass divides by.

        Raises:
            UsageError: A divisor depends on targets or weights, or the factors differ from those of
                earlier passes.
        """
        factors = [said / divisor.number for divisor in divisors]
        self._factors = self._factors or factors
        wrong = [d for d in divisors if not (d.may_be_constant or _are_close(said, d.number))]
        if len(factors) != len(self._factors) or not all(map(_are_close, factors, self._factors)):
            wrong += divisors
        if wrong:
            path, number, shape = wrong[0]
            raise UsageError(
                f"normaliser= says that the loss divides by {said:g}, but {path} divides by "
                f"{number:g} on {[*shape]}, which has another ratio in other batches (as with "
                "targets that are ignored, class weights, or other lengths). Then a sample would "
                'change what others give: use reduction="sum" in the loss, and normaliser=None.'
            )


def divisor_of(view: View) -> Divisor | None:
    """What a call divides by, if it is an extended loss that says so."""
    if not view.call.rule.is_loss:
        return None
    with suppress(UsageError, UnsupportedError):
        number = normaliser_of(view)
        return Divisor(view.path, 1.0 if number is None else float(number), view.input_shape)
    return None


def _are_close(first: float, second: float) -> bool:
    return isclose(first, second, rel_tol=1e-5)  # divisors are sums in single precision
