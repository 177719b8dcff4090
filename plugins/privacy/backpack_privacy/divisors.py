"""What losses divide by, compared with what was said: ``normaliser="samples"``, or a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core import View
from backpack_core.contract.rules import normaliser_of
from backpack_core.errors import UnsupportedError, UsageError


class Divisor(NamedTuple):
    """What one extended loss divides by.

    Attributes:
        path: Which loss it is.
        number: The divisor; 1 for a sum.
        factor: What the model's own loss multiplies this loss by.
        shape: The shape of what the loss received.
    """

    path: str
    number: float
    factor: float
    shape: torch.Size

    @property
    def whole(self) -> float:
        """The divisor with the factor."""
        return self.number / self.factor

    def may_be(self, said: float) -> bool:
        """Whether it may be what was said, times a constant. Later batches tell more.

        It is the same number for each sample, whatever targets and weights are; or it is what was
        said; or the model's own loss multiplies by something that may undo it.
        """
        share = self.number / max(1, self.shape[:1].numel())
        is_whole = round(share) > 0 and _are_close(share, round(share))
        is_undone = (said == 1 and not _are_close(self.factor, 1.0)) or _are_close(said, self.whole)
        return self.number == 1 or is_whole or is_undone or _are_close(said, self.number)


class Divisors:
    """Compares the divisors of the losses in all passes.

    An extended loss says what it divides by. If that depends on the samples of a batch, and
    something else was said, a sample that is added changes what all others give. No bound covers
    this.
    """

    def __init__(self) -> None:
        """Nothing is known before the first pass."""
        self._known: dict[tuple[str, int], tuple[float, float]] = {}

    def check(self, said: float, divisors: Sequence[Divisor]) -> None:
        """Refuse a number that is not what the losses divide by, up to a constant factor.

        Args:
            said: What was said.
            divisors: What each loss of a pass divides by.

        Raises:
            UsageError: A divisor depends on targets or weights, or the factors differ from those of
                earlier passes.
        """
        wrong = [each for each in divisors if not each.may_be(said)]
        seen: dict[tuple[str, int], tuple[float, float]] = {}
        uses = Counter[str]()
        for divisor in divisors:
            key = divisor.path, uses[divisor.path]
            uses[divisor.path] += 1
            # A weight of the loss may follow a schedule, or undo a mean.
            seen[key] = said / divisor.number, said / divisor.whole
            if not any(map(_are_close, seen[key], self._known.get(key, seen[key]))):
                wrong.append(divisor)
        if wrong:
            path, number, _, shape = wrong[0]
            raise UsageError(
                f"normaliser= says that the loss divides by {said:g}, but {path} divides by "
                f"{number:g} on {[*shape]}, which has another ratio in other batches (as with "
                "targets that are ignored, class weights, or other lengths). Then a sample would "
                'change what others give: use reduction="sum" in the loss, and normaliser=None.'
            )
        self._known = seen | self._known


class Noted(NamedTuple):
    """What an extended loss says in a pass; its tensors are not looked at, so it can be recorded.

    Attributes:
        path: Which loss it is.
        number: What it divides by; ``None`` for a sum.
        factor: What the model's own loss multiplies this loss by, times the scale.
        shape: The shape of what the loss received.
    """

    path: str
    number: float | Tensor | None
    factor: Tensor
    shape: tuple[int, ...]


def noted(view: View) -> list[Noted]:
    """What a call says about its divisor, if it is an extended loss that takes part.

    Args:
        view: The call.

    Raises:
        UnsupportedError: Samples share terms of the loss, by targets that broadcast its input.
    """
    rule: Any = view.call.rule
    if not rule.is_loss or view.grad_output is None:
        return []
    rule.check_terms(view)
    with suppress(UsageError, UnsupportedError):
        return [Noted(view.path, normaliser_of(view), view.grad_output, tuple(view.input_shape))]
    return []


def divisors_of(found: Sequence[Noted], scale: float) -> list[Divisor]:
    """What losses divide by.

    Args:
        found: What they say.
        scale: What the model's own loss was multiplied by.
    """
    numbers = [
        (1.0 if n.number is None else float(n.number), float(n.factor) / scale) for n in found
    ]
    return [
        Divisor(each.path, number, factor, torch.Size(each.shape))
        for each, (number, factor) in zip(found, numbers, strict=True)
        if number * factor  # a loss of nothing has gradients that are not numbers
    ]


def _are_close(first: float, second: float) -> bool:
    return isclose(first, second, rel_tol=1e-5)  # divisors are sums in single precision
