"""Losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from backpack_core.testing import LossCase
from backpack_layers.autodiff_loss import AutodiffLoss
from backpack_layers.language import CausalLMLoss
from backpack_secondorder.outputs import SumOutputs

WEIGHT = torch.tensor([0.5, 1.5], dtype=torch.float64)


def loss(
    kind: Callable[..., nn.Module],
    target: Callable[[int], Tensor],
    *shape: int,
    prediction: Callable[..., Tensor] = torch.randn,
    further: Callable[[int], tuple[Any, ...]] = lambda n: (),
    **options: Any,
) -> LossCase:
    """A loss on random predictions ``[N, *shape]``."""
    return LossCase(
        kind, lambda n: (prediction(n, *(shape or (2,))), target(n), *further(n)), **options
    )


def real(n: int) -> Tensor:
    return torch.randn(n, 2)


def label(n: int) -> Tensor:
    return torch.randint(0, 2, (n, 2)).double()


def soft(n: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(n, 2)


def classes(n: int) -> Tensor:
    return torch.arange(n) % 2


def probability(*shape: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(*shape)


def tokens(n: int) -> Tensor:
    """Tokens of which some do not count, all of them in one sequence."""
    found = torch.randint(0, 2, (n, 4))
    found[0, 2] = -100
    found[n // 2, 1:] = -100
    return found


def squared(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square() / 2


CASES: list[LossCase] = [
    LossCase(SumOutputs, lambda n: (torch.randn(n, 2),), sampled=False),
    loss(
        partial(
            AutodiffLoss,
            partial(nn.functional.cross_entropy, reduction="none"),
            likelihood=lambda x: Categorical(logits=x),
        ),
        classes,
        name="AutodiffLoss, classes",
    ),
    loss(partial(AutodiffLoss, squared), real, sampled=False, name="AutodiffLoss, squares"),
    loss(CausalLMLoss, tokens, 4, 2),
    loss(partial(CausalLMLoss, average="sequence"), tokens, 4, 2),
    loss(partial(CausalLMLoss, shift=False), tokens, 4, 2),
    loss(nn.MSELoss, real),
    loss(nn.MSELoss, lambda n: torch.randn(n, 2, 2), 2, 2, name="MSELoss, positions"),
    loss(nn.L1Loss, real, sampled=False),
    loss(nn.HuberLoss, real),
    loss(partial(nn.HuberLoss, delta=0.4), real),
    loss(partial(nn.SmoothL1Loss, beta=0.7), real),
    loss(nn.PoissonNLLLoss, lambda n: torch.randint(0, 4, (n, 2)).double()),
    loss(
        partial(nn.PoissonNLLLoss, log_input=False, eps=1e-2),
        lambda n: torch.randint(0, 4, (n, 2)).double(),
        prediction=probability,
        name="PoissonNLLLoss, rates",
    ),
    loss(nn.GaussianNLLLoss, real, further=lambda n: (soft(n),)),
    loss(nn.CrossEntropyLoss, classes),
    loss(partial(nn.CrossEntropyLoss, weight=WEIGHT), classes, name="CrossEntropyLoss, weighted"),
    loss(partial(nn.CrossEntropyLoss, ignore_index=1), classes, name="CrossEntropyLoss, ignored"),
    loss(
        partial(nn.CrossEntropyLoss, label_smoothing=0.2),
        lambda n: torch.randint(0, 2, (n, 2)),
        2,
        2,
        name="CrossEntropyLoss, positions, smoothed",
    ),
    loss(
        nn.CrossEntropyLoss, lambda n: torch.randn(n, 2).softmax(1), name="CrossEntropyLoss, soft"
    ),
    loss(nn.NLLLoss, classes, sampled=False),
    loss(
        nn.KLDivLoss,
        soft,
        sampled=False,
    ),
    loss(nn.BCEWithLogitsLoss, label),
    loss(
        partial(nn.BCEWithLogitsLoss, weight=WEIGHT, pos_weight=2 * WEIGHT),
        soft,
        name="BCEWithLogitsLoss, weighted",
    ),
    loss(nn.BCELoss, soft, prediction=probability),
    loss(nn.SoftMarginLoss, lambda n: 2 * label(n) - 1),
    loss(nn.MultiLabelSoftMarginLoss, label),
]
