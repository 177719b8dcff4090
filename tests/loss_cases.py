"""Losses as data, each on the output of a small net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from tests.cases import Problem


@dataclass
class LossCase:
    """A loss on the output of a small net.

    Attributes:
        make: Makes the loss; takes ``reduction``.
        shape: Shape of the output, without the batch axis.
        target: Makes the target for an output.
        id: Name of the case.
    """

    make: Callable[..., Module]
    shape: tuple[int, ...]
    target: Callable[[Tensor], Tensor]
    id: str

    def problem(self, batch: int, reduction: str) -> Problem:
        """``Linear``, ``Tanh``, ``Linear``, ``Unflatten``, and the loss."""
        size = torch.Size(self.shape).numel()
        model = nn.Sequential(
            nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, size), nn.Unflatten(1, self.shape)
        )
        x = torch.randn(batch, 2)
        target = self.target(torch.zeros(batch, *self.shape))
        return Problem(model, (x,), self.make(reduction=reduction), target)


def _classes(*shape: int, ignored: bool = False) -> Callable[[Tensor], Tensor]:
    def target(output: Tensor) -> Tensor:
        result = torch.randint(0, output.shape[1], (len(output), *shape))
        if ignored:
            result.view(-1)[-1] = 1
            result.view(-1)[0] = 0
        return result

    return target


def _probabilities(output: Tensor) -> Tensor:
    return torch.rand_like(output).softmax(1)


def _cross_entropy(**options: Any) -> Callable[..., Module]:
    return lambda reduction: nn.CrossEntropyLoss(reduction=reduction, **options)


def _weight() -> dict[str, Any]:
    return {"weight": torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)}


LOSSES: list[LossCase] = [
    LossCase(nn.MSELoss, (3,), torch.randn_like, "mse"),
    LossCase(nn.MSELoss, (2, 2), torch.randn_like, "mse-2x2"),
    LossCase(_cross_entropy(), (3,), _classes(), "ce"),
    LossCase(_cross_entropy(), (3,), _probabilities, "ce-probabilities"),
    LossCase(_cross_entropy(**_weight()), (3,), _classes(), "ce-weight"),
    LossCase(_cross_entropy(**_weight()), (3,), _probabilities, "ce-weight-probabilities"),
    LossCase(_cross_entropy(ignore_index=0), (3, 2), _classes(2, ignored=True), "ce-ignore"),
    LossCase(
        _cross_entropy(ignore_index=0, **_weight()),
        (3, 2),
        _classes(2, ignored=True),
        "ce-ignore-weight",
    ),
    LossCase(_cross_entropy(label_smoothing=0.2), (3,), _classes(), "ce-smoothing"),
    LossCase(
        _cross_entropy(label_smoothing=0.2, **_weight()), (3,), _classes(), "ce-smoothing-weight"
    ),
    LossCase(_cross_entropy(), (3, 2), _classes(2), "ce-2"),
    LossCase(_cross_entropy(), (2, 2, 2), _probabilities, "ce-2x2-probabilities"),
    LossCase(nn.BCEWithLogitsLoss, (3,), lambda out: torch.rand_like(out), "bce"),
    LossCase(
        lambda reduction: nn.BCEWithLogitsLoss(
            reduction=reduction,
            weight=torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64),
            pos_weight=torch.tensor([1.5, 1.0, 3.0], dtype=torch.float64),
        ),
        (3,),
        lambda out: torch.randint(0, 2, out.shape).to(out.dtype),
        "bce-weight",
    ),
]
