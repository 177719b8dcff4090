"""Nets, data, and extensions, for quantities of several batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_core.record.nested import iter_tensors

DETERMINISTIC: list[Any] = [
    BatchGrad,
    BatchL2Grad,
    SumGradSquared,
    Variance,
    DiagGGNExact,
    BatchDiagGGNExact,
    SqrtGGNExact,
    DiagHessian,
    BatchDiagHessian,
    KFLR,
]
SAMPLED: list[Any] = [KFAC, EKFAC]
CLASSES = 3


def net() -> nn.Module:
    """Convolution, transposed convolution, normalisation, linear: all orders of parameters."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2),
        nn.Sigmoid(),
        nn.ConvTranspose2d(2, 2, 2),
        nn.Flatten(),
        nn.Linear(18, CLASSES),
    ).double()
    # The same in every process, whatever its default dtype.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        nn.init.zeros_(parameter).data += 0.4 * drawn
    return model


def data(samples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 1, 3, 3, dtype=torch.float64, generator=generator)
    return x, torch.arange(samples) % CLASSES


def batches(x: Tensor, y: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def loss(reduction: str = "mean", ignored: int = 2) -> nn.CrossEntropyLoss:
    """With weights and an ignored class: a mean divides by neither samples nor batches."""
    weight = torch.tensor([0.5, 1.5, 2.0], dtype=torch.float64)
    return nn.CrossEntropyLoss(weight, reduction=reduction, ignore_index=ignored)


def expected(
    extensions: list[Extension],
    x: Tensor,
    y: Tensor,
    reduction: str = "mean",
    ignored: int = 2,
) -> dict[tuple[str, str], Any]:
    """One backward pass over all samples."""
    model, lossfunc = extend(net()), extend(loss(reduction, ignored))
    value = lossfunc(model(x), y)
    with backpack(*extensions):
        value.backward()
    return {
        (name, e.savefield): getattr(p, e.savefield)
        for name, p in model.named_parameters()
        for e in extensions
    }


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    """Tensor by tensor, relative to the largest entry."""
    pairs = list(zip(iter_tensors(found), iter_tensors(wanted), strict=True))
    assert pairs
    for one, other in pairs:
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-30)
