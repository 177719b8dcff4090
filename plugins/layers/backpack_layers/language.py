"""The loss of language models on logits of all positions: targets are shifted, some ignored."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from backpack_core.errors import UsageError
from backpack_core.record.view import View
from backpack_layers._loss import check_arguments, restrict, setting
from backpack_layers.arguments import tensor
from backpack_layers.loss_classification import SoftmaxLossRule

Reduction = Literal["mean", "sum", "none"]
Average = Literal["token", "sequence"]


class CausalLMLoss(Module):
    """Cross-entropy of each token with the logits at the position before it.

    ``ℓ = Σ_n Σ_t w[n, t] · -log softmax(x[n, t])[y[n, t + 1]]``, with ``w = 0`` where the target is
    ``ignore_index``, for logits ``[N, T, C]`` and tokens ``[N, T]`` (the ``labels`` of a model of
    the ``transformers`` package). The samples of this loss are sequences.

    For other targets, with ``K_n`` the number of a sequence's tokens that count, and
    ``K = Σ_n K_n``:

    ============= ======================= =========================
    ``reduction`` ``average="token"``     ``average="sequence"``
    ============= ======================= =========================
    ``"mean"``    ``w = 1 / K``           ``w = 1 / (N K_n)``
    ``"sum"``     ``w = 1``               ``w = 1 / K_n``
    ``"none"``    ``[N]``, ``w = 1``      ``[N]``, ``w = 1 / K_n``
    ============= ======================= =========================

    Args:
        reduction: What is returned.
        average: Whether all tokens, or all sequences, have the same weight.
        ignore_index: Targets that do not count. If none counts, the loss is zero.
        shift: Whether a position predicts the next token. Otherwise it predicts its own, as in
            masked language models, and in decoders that get shifted inputs.
    """

    def __init__(
        self,
        reduction: Reduction = "mean",
        average: Average = "token",
        ignore_index: int = -100,
        shift: bool = True,
    ) -> None:
        """Store the settings.

        Args:
            reduction: See the class.
            average: See the class.
            ignore_index: See the class.
            shift: See the class.

        Raises:
            UsageError: A setting is unknown.
        """
        super().__init__()
        if reduction not in get_args(Reduction):
            raise UsageError(f"reduction must be one of {get_args(Reduction)}. Got {reduction!r}.")
        if average not in get_args(Average):
            raise UsageError(f"average must be one of {get_args(Average)}. Got {average!r}.")
        self.reduction = reduction
        self.average = average
        self.ignore_index = ignore_index
        self.shift = shift

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss.

        Args:
            input: Logits. Shape ``[N, T, C]``.
            target: Tokens. Shape ``[N, T]``.

        Returns:
            A number, or ``[N]`` without a reduction.

        Raises:
            UsageError: The shapes do not fit.
        """
        if input.dim() != 3 or target.shape != input.shape[:2]:
            raise UsageError(
                "CausalLMLoss takes logits [N, T, C] and tokens [N, T]. "
                f"Got {list(input.shape)} and {list(target.shape)}."
            )
        logits, labels = (input[:, :-1], target[:, 1:]) if self.shift else (input, target)
        each = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=self.ignore_index, reduction="none"
        )
        loss = (each * self.token_weights(target, each.dtype)).sum(1)
        return loss if self.reduction == "none" else loss.sum()

    def token_weights(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """``w`` at the positions whose logits count, ``[N, T - 1]`` (``[N, T]`` without a shift).

        Args:
            target: Tokens of the whole batch. Shape ``[N, T]``.
            dtype: Their dtype; they are computed at least in single precision.
        """
        labels = target[:, 1:] if self.shift else target
        counts = (labels != self.ignore_index).to(torch.promote_types(dtype, torch.float32))
        if self.average == "sequence":
            counts = counts / counts.sum(1, keepdim=True).clamp(min=1)
        return (counts * self.normalisation(target)).to(dtype)

    def normalisation(self, target: Tensor) -> float | Tensor:
        """The factor that the mean puts in front of the sum: ``1/K`` or ``1/N``.

        Args:
            target: Tokens of the whole batch. Shape ``[N, T]``.
        """
        if self.reduction != "mean":
            return 1.0
        if self.average == "sequence":
            return 1.0 / max(1, len(target))
        labels = target[:, 1:] if self.shift else target
        return 1.0 / (labels != self.ignore_index).sum().clamp(min=1)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.reduction!r}, {self.average!r}, shift={self.shift}"


class CausalLMLossRule(SoftmaxLossRule):
    """Classes on the last axis, positions on axis 1; the last position has no target."""

    module_types = (CausalLMLoss,)

    def is_convex(self, view: View) -> bool:
        """Always: tokens are counted."""
        return True

    def check_terms(self, view: View) -> None:
        """The input needs axes of samples, positions and classes."""
        check_arguments(view, axes=3)

    def normalisation(self, view: View) -> float | Tensor:
        """A mean is over the tokens that count, or over sequences."""
        return cast(CausalLMLoss, view.module).normalisation(tensor(view.full, "target"))

    def by_position(self, view: View, x: Tensor) -> Tensor:
        """As for cross-entropy, without the last position if targets are shifted."""
        kept = x[..., :-1, :] if setting(view, "shift") else x
        return kept.transpose(-1, -2)

    def at_input(self, view: View, mat: Tensor) -> Tensor:
        """The reverse, with zeros at the last position if targets are shifted."""
        mat = mat.transpose(-1, -2)
        return F.pad(mat, (0, 0, 0, 1)) if setting(view, "shift") else mat

    def weight(self, view: View) -> Tensor:
        """The weight of each token, by the whole batch."""
        target = tensor(view.full, "target")
        dtype = torch.promote_types(view.dtype, torch.float32)
        whole = cast(CausalLMLoss, view.module).token_weights(target, dtype)
        return restrict(view, whole).unsqueeze(1)
