"""Squares that leave the range of numbers: what is warned of, and factors whose squares do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from backpack_core import Extension, backpack, extend
from backpack_core.extensions import BatchL2Grad, ClippedSumGrad
from backpack_firstorder import squares


@pytest.mark.parametrize(("large", "small"), [(1e10, 3e-22), (3e-22, 1e10), (1.0, 1.0)])
@pytest.mark.parametrize("rows", [1, 2])
def test_squares_of_factors_that_lose_digits(large: float, small: float, rows: int) -> None:
    """Their product is in range, where the square of one of them is not."""
    inp, out = large * torch.randn(3, 5), small * torch.randn(3, 4)
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = extend(nn.Linear(5, 4 * rows, bias=False)).to(dtype)
        with backpack(BatchL2Grad()):
            (model(inp.to(dtype)) * out.to(dtype).repeat(1, rows)).sum().backward()
        found[dtype] = model.weight.batch_l2.double()
    torch.testing.assert_close(found[torch.float32], found[torch.float64], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("norm", "square", "expected"),
    [(1.0, 1.0, False), (0.0, 0.0, False), (1e-30, 0.0, True), (1e30, float("inf"), True),
     (float("inf"), float("inf"), False), (float("nan"), float("nan"), False)],
    ids=str,
)  # fmt: skip
def test_what_leaves_the_range(norm: float, square: float, expected: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            squares.warn_of_range(torch.tensor([norm]), torch.tensor([square]), "key", "text")
    assert len(caught) == expected


@pytest.mark.parametrize(
    "extension", [BatchL2Grad, partial(ClippedSumGrad, 1e-12, normaliser=None)]
)
@pytest.mark.parametrize(("large", "small"), [(1e12, 3e-22), (3e-22, 1e12)])
@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 5)], ids=["rows", "positions"])
def test_factors_that_lose_digits(
    large: float, small: float, shape: tuple[int, ...], extension: Callable[[], Extension]
) -> None:
    """The square of one of them is subnormal; their product is in the middle of the range."""
    torch.manual_seed(1)
    inp, out = large * torch.randn(shape), small * torch.randn(*shape[:-1], 6)
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = extend(nn.Linear(5, 6, bias=False)).to(dtype)
        with backpack(extension()):
            (model(inp.to(dtype)) * out.to(dtype)).sum().backward()
        found[dtype] = getattr(model.weight, extension().savefield).double()
    torch.testing.assert_close(found[torch.float32], found[torch.float64], rtol=1e-5, atol=0)


@pytest.mark.parametrize("extension", [BatchL2Grad, partial(ClippedSumGrad, 1e-6, normaliser=None)])
@pytest.mark.parametrize("size", [1, 3])
def test_groups_at_the_ends_of_the_range(size: int, extension: Callable[[], Extension]) -> None:
    """A group that the others would hide, were there one scale for all."""
    torch.manual_seed(1)
    inp, out = torch.randn(4, 6, size), torch.randn(4, 4, size)
    inp[:, :3], out[:, :2] = 1e-23 * inp[:, :3], 1e20 * out[:, :2]
    out[:, 2:] *= 1e-5
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = extend(nn.Conv1d(6, 4, 1, groups=2, bias=False)).to(dtype)
        with backpack(extension()):
            (model(inp.to(dtype)) * out.to(dtype)).sum().backward()
        found[dtype] = getattr(model.weight, extension().savefield).double()
    largest = found[torch.float64].abs().max()
    torch.testing.assert_close(
        found[torch.float32] / largest, found[torch.float64] / largest, rtol=1e-4, atol=1e-6
    )
