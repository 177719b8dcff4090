"""Damping that adapts to how well the quadratic model of the loss predicts a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_optimizers.groups import require_count, require_positive, require_share


def require_adapting(adapt: object) -> None:
    """Raise :class:`UsageError` unless ``adapt`` is ``None`` or a rule that adapts damping."""
    if adapt is not None and not isinstance(adapt, LevenbergMarquardt):
        raise UsageError(
            "adapt must be None, or a rule with its settings: write adapt=LevenbergMarquardt(). "
            f"Got {adapt!r:.80}."
        )


@dataclass(frozen=True)
class LevenbergMarquardt:
    """The rule of Levenberg and Marquardt, as in Martens and Grosse (2015), section 6.5.

    ``ρ`` is the change of the loss by a step, divided by the change that the quadratic model
    ``gᵀd + ½ dᵀ(F + damping · I)d`` of the step predicts. Above ``3/4``, the damping is multiplied
    by ``shrink``; below ``1/4``, it is divided by it.

    Attributes:
        every: How many steps lie between two comparisons; each costs a pass over the batch.
        shrink: A factor below one.
        smallest: The smallest damping.
        largest: The largest damping.
    """

    every: int = 5
    shrink: float = 0.95**5
    smallest: float = 1e-8
    largest: float = 1e4

    def __post_init__(self) -> None:
        """Check the settings."""
        require_count("every", self.every)
        for name in ("shrink", "smallest", "largest"):
            require_positive(name, getattr(self, name))
        require_share("shrink", self.shrink)

    def __call__(self, damping: float, change: float, predicted: float) -> float:
        """The next damping.

        Args:
            damping: The damping so far.
            change: Loss after the step minus that before.
            predicted: The same, by the quadratic model.
        """
        if not change and not predicted:  # no step, at a rate of zero: nothing was compared
            return damping
        ratio = change / predicted if predicted < 0 and isfinite(change) else -1.0
        if ratio > 0.75:
            damping *= self.shrink
        elif ratio < 0.25:
            damping /= self.shrink
        return min(max(damping, self.smallest), self.largest)


@torch.no_grad()
def predicted_change(
    parameters: Sequence[Tensor],
    before: Sequence[Tensor],
    times: Callable[[Tensor, Tensor], Tensor],
    damping: float,
) -> float:
    """How much the quadratic model changes by a step that was made.

    Args:
        parameters: The parameters after the step; those with a gradient count.
        before: Their values before the step.
        times: ``F`` times a vector, for a parameter.
        damping: Added to ``F``.
    """
    predicted = 0.0
    for parameter, start in zip(parameters, before, strict=True):
        if parameter.grad is not None:
            step = parameter - start
            curved = times(parameter, step) + damping * step
            predicted += float(((parameter.grad + 0.5 * curved) * step).sum())
    return predicted
