"""Margins ``log(p / (1 - p))`` of right answers, as TRAK takes them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack_core.errors import UsageError
from backpack_layers.language import CausalLMLoss

_LOGITS = (nn.CrossEntropyLoss, nn.NLLLoss, CausalLMLoss)  # of classes
_LOG_PROBABILITIES = (*_LOGITS, nn.BCELoss, nn.BCEWithLogitsLoss)


class Margin(Module):
    """``Σ log(p / (1 - p))`` of the right answers, as a function of output and target.

    From logits, the margin is ``x_y - log Σ_{c≠y} exp(x_c)``. So it is exact however certain the
    answer is, where ``1 - p`` is rounded to zero. A loss that only shows ``-log p`` (of
    probabilities, or a module of the user) has no margins there: such answers do not count.
    """

    def __init__(self, lossfunc: Any) -> None:
        """Take answers, or their losses ``-log p``, from a loss module.

        Raises:
            UsageError: The loss is not a module of this kind.
        """
        super().__init__()
        is_module = isinstance(lossfunc, Module) and hasattr(lossfunc, "reduction")
        if not is_module or not _may_be_log_probability(lossfunc):
            raise UsageError(
                "TRAK takes margins of a cross-entropy: give a loss module with a reduction, but "
                "without weights and label smoothing, such as CrossEntropyLoss(). Got "
                f"{type(lossfunc).__name__}."
            )
        each: Any = copy.deepcopy(lossfunc)
        each.reduction = "none"
        self._each = each
        self.reduction = "sum"

    def each(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Margins and whether they count, one for each sample and position; zero where not.

        Raises:
            UsageError: Targets are not right answers, but probabilities.
        """
        if type(self._each) in _LOGITS:
            if isinstance(self._each, CausalLMLoss):
                if self._each.shift:
                    output, target = output[:, :-1], target[:, 1:]
                output = output.transpose(1, 2)
            return _of_classes(_wide(output), target, self._each.ignore_index)
        if type(self._each) is nn.BCEWithLogitsLoss:
            _require_answers(((target == 0) | (target == 1)).all())
            return _wide(output) * (2 * target - 1), torch.ones_like(output, dtype=torch.bool)
        losses = self._each(output, target)
        counts = ~(losses <= 0)  # what is not a number counts, and is found
        safe = torch.where(counts, losses, 1.0)
        found = -safe - torch.log(-torch.expm1(-safe))
        return torch.where(counts, found, 0.0), counts

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the margins, without ignored targets."""
        return self.each(output, target)[0].sum()


def _of_classes(logits: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Margins of logits ``[N, C, *]`` and classes ``[N, *]``, or of a single sample."""
    axis = min(1, logits.dim() - 1)
    _require_answers(not target.is_floating_point())
    counts = target != ignored
    right = torch.where(counts, target, 0).unsqueeze(axis)
    answers = logits.gather(axis, right).squeeze(axis)
    others = logits.scatter(axis, right, -torch.inf)
    counts = counts & ~others.isneginf().all(axis)  # without another answer
    others = torch.where(counts.unsqueeze(axis), others, 0.0)
    found = answers - others.logsumexp(axis)
    return torch.where(counts, found, 0.0), counts


def _wide(output: Tensor) -> Tensor:
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _require_answers(are_there: Any) -> None:
    if not bool(are_there):
        raise UsageError(
            "TRAK takes the margin of the right answer, and these targets are probabilities. Give "
            "classes, or zeros and ones for BCEWithLogitsLoss()."
        )


def _may_be_log_probability(lossfunc: Module) -> bool:
    """Whether losses may be ``-log p``, as is assumed for the user's own modules."""
    if not type(lossfunc).__module__.startswith("torch.nn."):
        return True
    settings = [getattr(lossfunc, name, None) for name in ("weight", "pos_weight")]
    is_scaled = any(value is not None for value in settings)
    is_smoothed = bool(getattr(lossfunc, "label_smoothing", 0))
    return isinstance(lossfunc, _LOG_PROBABILITIES) and not (is_scaled or is_smoothed)
