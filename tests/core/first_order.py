"""All quantities of first order against a loop over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import backpack
from backpack_core.extensions import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    SumGradSquared,
    Variance,
)
from backpack_core.testing import oracle as kit
from tests.oracle import assert_close


def check(model: nn.Module, loss: Callable[[], Tensor], alone: Sequence[Tensor]) -> None:
    """Compare.

    Args:
        model: An extended model.
        loss: Returns that of the batch.
        alone: Those of single samples, as scaled in the loss of the batch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    parts = [kit.gradients(part, parameters) for part in alone]
    gradients = [torch.stack(each) for each in zip(*parts, strict=True)]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    bound = norms.median().item()
    first, second = (BatchGrad(), BatchL2Grad(), SumGradSquared()), (Variance(), BatchDotGrad())
    value = loss()
    with backpack(*first, *second, ClippedSumGrad(bound, normaliser=None), check="always"):
        value.backward()
    scale = (bound / norms).clamp(max=1)
    for p, g in zip(parameters, gradients, strict=True):
        ours: Any = p
        if p.grad is None:  # as of a bias that no derivative depends on
            assert not g.any()
            continue
        assert_close(ours.grad_batch, g)
        assert_close(ours.batch_l2, g.flatten(1).square().sum(1))
        assert_close(ours.sum_grad_squared, g.square().sum(0))
        assert_close(1 + ours.variance, 1 + g.var(0, unbiased=False))
        assert_close(ours.batch_dot, g.flatten(1) @ g.flatten(1).T)
        assert_close(ours.grad_clipped, torch.einsum("n,n...->...", scale, g))
