"""Terms without a rule: beside the extended losses, or in their place, as functions or modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _weight_penalty(value: Tensor, weights: list[Tensor]) -> Tensor:
    return torch.stack([w.square().sum() for w in weights]).sum()


def _contrastive(value: Tensor, weights: list[Tensor]) -> Tensor:
    features = F.normalize(value.flatten(1) + 0.1, dim=1)
    return F.cross_entropy(features @ features.mT, torch.arange(len(value)))


def _cross_correlation(value: Tensor, weights: list[Tensor]) -> Tensor:
    z = value.flatten(1)
    return (z.mT @ z / len(z) - torch.eye(z.shape[1])).square().sum()


def _spread(value: Tensor, weights: list[Tensor]) -> Tensor:
    """What is the same for all samples is punished."""
    z = value.flatten(1)
    return F.softplus(1 - ((z - z.mean(0)).square().mean(0) + 0.01).sqrt()).mean()


def _entropy_of_mean(value: Tensor, weights: list[Tensor]) -> Tensor:
    mean = value.flatten(1).softmax(1).mean(0)
    return (mean * mean.log()).sum()


def _determinant(value: Tensor, weights: list[Tensor]) -> Tensor:
    z = value.flatten(1)
    return torch.logdet(z.mT @ z + torch.eye(z.shape[1]))


def _overlap(value: Tensor, weights: list[Tensor]) -> Tensor:
    """The Dice loss, over the whole batch."""
    p = value.sigmoid().flatten()
    return 1 - 2 * p[::2].sum() / (1 + p.sum())


def _neighbours(value: Tensor, weights: list[Tensor]) -> Tensor:
    return (value[1:] - value[:-1]).square().sum() + value.sin().sum()


@dataclass(frozen=True)
class Beside:
    """A term beside the extended losses, or in their place: a function, or a module without a rule.

    Attributes:
        function: ``function(value, weights)`` of an output of the net and its parameters.
        trap: What it does to quantities, see :mod:`tests.nets.scope`.
        trap_of_one: The same for a batch of one; empty where nothing is left of it.
    """

    function: Callable[[Tensor, list[Tensor]], Tensor]
    trap: str
    trap_of_one: str


BESIDE: dict[str, Beside] = {
    "weight_penalty": Beside(_weight_penalty, "weights", "weights"),
    "output_penalty": Beside(lambda value, _: value.square().mean(), "beside", "beside"),
    "entropy": Beside(
        lambda value, _: (value.flatten(1).softmax(1) * value.flatten(1).log_softmax(1)).sum(),
        "beside",
        "beside",
    ),
    "contrastive": Beside(_contrastive, "coupled", ""),
    "batch_statistic": Beside(lambda value, _: value.mean(0).square().sum(), "coupled", "beside"),
    "cross_correlation": Beside(_cross_correlation, "coupled", "beside"),
    "spread": Beside(_spread, "coupled", ""),
    "entropy_of_mean": Beside(_entropy_of_mean, "coupled", "beside"),
    "determinant": Beside(_determinant, "coupled", "beside"),
    "overlap": Beside(_overlap, "coupled", "beside"),
    "neighbours": Beside(_neighbours, "coupled", "beside"),
}


class OwnTerm(nn.Module):
    """A term as a module of the user's, which is extended."""

    def __init__(self, term: Beside) -> None:
        super().__init__()
        self.term = term

    def forward(self, value: Tensor) -> Tensor:
        return self.term.function(value, [])
