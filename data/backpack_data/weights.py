"""The weight of a batch: the normalisers of its losses, and the number of its samples."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isclose
from typing import Any

from backpack_core import View
from backpack_core._torch import graph_task_id
from backpack_core.contract.rules import Normaliser, normaliser_of
from backpack_core.errors import BackpackError, UsageError


class Weights:
    """Observes one backward pass; pass it as ``observer`` to ``backpack(...)``.

    Attributes:
        reduced: Fields whose values are already those of all processes.
        fault: Why a loss has no normaliser. The error is raised when values are added, because
            other processes can be told then, and not in the middle of the pass.
    """

    def __init__(self, of_losses: bool = True) -> None:
        """Begin with nothing.

        Args:
            of_losses: Whether to ask losses for their normalisers.
        """
        self._divisors: list[tuple[str, Normaliser]] = []
        self.reduced: set[str] = set()
        self.fault: BackpackError | None = None
        self._of_losses = of_losses
        self._samples: int | None = None
        self._passes: set[int] = set()

    def __call__(self, view: View) -> None:
        """Take note of one visited output.

        Raises:
            UsageError: A loss belongs to a second backward pass.
        """
        if self._samples is None:
            self._samples = view.samples
        if not view.call.rule.is_loss:
            return
        self._passes.add(graph_task_id())
        if len(self._passes) > 1:
            raise UsageError(
                "A second backward pass began inside one block, and values of the first would "
                "be lost: enter the block once for each backward pass."
            )
        if self._of_losses:
            try:
                self._divisors.append((view.path, normaliser_of(view)))
            except BackpackError as error:
                self.fault = self.fault or error

    @property
    def normalisers(self) -> list[float | None]:
        """What the losses of the pass divide by, in the order of their visits; ``None`` for sums.

        Raises:
            UsageError: One divides by zero.
        """
        return [_weight(path, divisor) for path, divisor in self._divisors]

    def found(self) -> Any:
        """What is known of the pass, for :meth:`of`: tensors and numbers."""
        if self.fault is not None:
            raise self.fault
        return self._divisors, self._samples

    @classmethod
    def of(cls, found: Any) -> Weights:
        """The weights of a pass, from what :meth:`found` returned in a captured step."""
        weights = cls()
        weights._divisors, weights._samples = found
        return weights

    def samples(self, subsampling: tuple[int, ...] | None) -> int:
        """How many samples take part.

        Args:
            subsampling: The samples that the extension takes; ``None`` for all.
        """
        return self._samples or 0 if subsampling is None else len(subsampling)


def _weight(path: str, divisor: Normaliser) -> float | None:
    """What a loss divides by, which is the weight of a batch; ``None`` for a sum."""
    if divisor is None:
        return None
    if not 0 < float(divisor) < inf:
        raise UsageError(
            f"{path} divides by the weights of the targets of a batch, which are zero in this one: "
            "leave the batch out, or use reduction='sum'."
        )
    return float(divisor)


def joint(normalisers: Iterable[float | None]) -> tuple[float | None, tuple[float, ...]]:
    """The normaliser of the first of several losses, and the ratios of all to it.

    Raises:
        UsageError: There is no loss, some losses are sums and some are means, or a number is not
            positive.
    """
    found = list(normalisers)
    if not found:
        raise UsageError(
            "No extended loss that has a rule took part in the backward pass, so the weight of a "
            "batch is not known: extend(lossfunc) with a loss module of torch.nn that has one, or "
            "give normaliser=, what the loss divides by (the number of samples for a mean, None "
            "for a sum)."
        )
    numbers = [_positive(number) for number in found if number is not None]
    if not numbers:
        return None, ()
    if len(numbers) < len(found):
        raise UsageError(
            "Some of the losses are sums and some are means, so batches have no weight in "
            "common: give all of them one reduction."
        )
    return numbers[0], tuple(number / numbers[0] for number in numbers)


def _positive(normaliser: Any) -> float:
    try:
        number = float(normaliser)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < inf:
        raise UsageError(
            "normaliser= is what the loss of a batch divides by, a positive number (the number of "
            f"samples for a mean), or None for a sum. Got {normaliser!r:.80}."
        )
    return number


def require_proportional(known: tuple[float, ...], new: tuple[float, ...]) -> None:
    """Raise an error unless the normalisers of several losses are proportional to those before."""
    pairs = zip(known, new, strict=False)
    if len(known) != len(new) or not all(isclose(a, b, rel_tol=1e-9) for a, b in pairs):
        raise UsageError(
            f"The losses of a batch divide by numbers with the ratios {list(new)}, and those of an "
            f"earlier batch with the ratios {list(known)}: their sum over all samples is not a "
            "weighted mean of the batches. Use reduction='sum', or one loss at a time."
        )
