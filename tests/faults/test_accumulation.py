"""Every extension in low and mixed precision: near to double precision, however much is added up.

A sum of 4,096 equal terms stays at 256 of them where it is kept in bfloat16, at 2,048 in float16:
an error of 94 % or 50 %. Rounding of what is added leaves far less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backpack_core.extensions
from backpack_core import backpack, extend
from tests.cases import names_of_extensions

MANY = 4096
# What stores a number for every pair of samples.
PAIRS = {"BatchDotGrad", "GGNGram", "NTK"}
SAMPLED = {"BatchDiagGGNMC", "DiagGGNMC", "EKFAC", "KFAC", "SqrtGGNMC"}
# Squares leave the range of half precision, so they are given in single precision.
SINGLE = {
    "BatchDotGrad",
    "BatchL2Grad",
    "GradInner",
    "ProjectedGrad",
    "SumGradSquared",
    "TaskDotGrad",
    "Variance",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ClippedSumGrad": {"max_norm": 0.1},
    "AggregatedGrad": {"weighting": lambda gram: gram.diagonal() / gram.trace()},
    "GradInner": {"queries": lambda name, shape: torch.eye(2, shape.numel()).reshape(2, *shape)},
    "ProjectedGrad": {"dim": 3},
}


# Dtype of the model, of autocast, and whether that is around the backward pass, too.
WAYS: dict[str, tuple[torch.dtype, torch.dtype | None, bool]] = {
    "bfloat16": (torch.bfloat16, None, False),
    "float16": (torch.float16, None, False),
    "autocast to bfloat16": (torch.float32, torch.bfloat16, False),
    "autocast to float16": (torch.float32, torch.float16, False),
    "autocast to bfloat16, whole step": (torch.float32, torch.bfloat16, True),
    "autocast to float16, whole step": (torch.float32, torch.float16, True),
}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 5, 1), nn.Sigmoid(), nn.Conv1d(5, 3, 1))


def alternating(count: int) -> tuple[Tensor, Tensor]:
    """Two different samples, each many times."""
    return torch.randn(2, 4).repeat(count // 2, 1), torch.tensor([0, 1]).repeat(count // 2)


def numbers(value: Any, p: Tensor, name: str) -> Tensor:
    """A result as one tensor, in its dtype; sampled ones without their draws of single samples."""
    if hasattr(value, "dense"):
        value = value.dense()
    elif hasattr(value, "gram"):
        value = value.gram
    elif not isinstance(value, Tensor):
        vectors = torch.randn(2, *p.shape, generator=torch.Generator().manual_seed(0))
        value = value(vectors.to(p.dtype))
    assert isinstance(value, Tensor)
    if name == "SqrtGGNMC":
        return value.float().square().sum((0, 1)).to(value.dtype)
    return value.float().sum(0).to(value.dtype) if name == "BatchDiagGGNMC" else value


def step(
    name: str, make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], way: str | None
) -> list[Tensor]:
    """The results for every parameter: in double precision, or in one of the ways.

    Parameters and data are numbers of the lowest precision, so that results differ by the
    rounding of the computation alone.
    """
    dtype, cast, whole = (torch.float64, None, False) if way is None else WAYS[way]
    torch.manual_seed(0)
    model = extend(make().to(torch.bfloat16).to(dtype))
    lossfunc = extend(nn.CrossEntropyLoss())
    x, y = data[0].to(torch.bfloat16).to(dtype), data[1]
    extension = getattr(backpack_core.extensions, name)(**OPTIONS.get(name, {}))

    def autocast(wanted: bool) -> Any:
        return torch.autocast("cpu", cast) if cast is not None and wanted else nullcontext()

    with autocast(whole):
        with autocast(not whole):
            loss = lossfunc(model(x), y)
        torch.manual_seed(1)
        with backpack(extension):
            # As a gradient scaler does, so that float16 has no numbers below its range.
            (loss * len(x)).backward()
        found = [getattr(p, extension.savefield) for p in model.parameters()]
        return [numbers(v, p, name) for v, p in zip(found, model.parameters(), strict=True)]


def compare(name: str, way: str, found: list[Tensor], expected: list[Tensor], count: int) -> None:
    """Norms of the difference; 32 roundings lie on the way, and squares double each."""
    dtype, cast, _ = WAYS[way]
    allowed = 32 * torch.finfo(cast or dtype).eps
    if name in SAMPLED:  # rounded probabilities draw other classes
        allowed += 3 / math.sqrt(count)
    largest = max(float(e.norm()) for e in expected)
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == (torch.float32 if name in SINGLE else dtype)
        error = float((ours.double() - reference).norm())
        # Where all of a parameter is zero (products with a softmax), rounding of others is left.
        assert error <= allowed * max(float(reference.norm()), 0.05 * largest)


@pytest.fixture(autouse=True)
def _single_precision(_double_precision: None) -> None:
    torch.set_default_dtype(torch.float32)


@pytest.mark.grid(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", names_of_extensions())
def test_many_samples(name: str, way: str) -> None:
    count = 128 if name in PAIRS else MANY
    data = alternating(count)
    expected = step(name, perceptron, data, None)
    compare(name, way, step(name, perceptron, data, way), expected, count)


@pytest.mark.host("draws of a GPU depend on the precision")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["BatchGrad", "BatchL2Grad", "BatchDotGrad", "SumGradSquared", "ClippedSumGrad", "KFAC"]
)
def test_many_positions(name: str, way: str) -> None:
    x, y = alternating(2 * MANY)
    data = x.unflatten(0, (2, MANY)).transpose(1, 2).contiguous(), y.unflatten(0, (2, MANY))
    expected = step(name, convolutions, data, None)
    compare(name, way, step(name, convolutions, data, way), expected, 2 * MANY)


def patches() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["KFLR", "KFRA"])
def test_many_patches(name: str, way: str) -> None:
    """Covariances of patches are added up sample by sample."""
    data = alternating(MANY)
    data = 0.5 + 0.01 * data[0].unsqueeze(1), data[1]
    expected = step(name, patches, data, None)
    compare(name, way, step(name, patches, data, way), expected, MANY)


def test_all_are_tried() -> None:
    assert {"BatchGrad", "KFAC", "DiagGGNExact", *PAIRS, *SAMPLED, *SINGLE} <= {
        *names_of_extensions()
    }
    assert len(names_of_extensions()) >= 22
