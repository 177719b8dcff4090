"""Warnings of squares that leave the range of numbers, where looking at them means to wait."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.errors import RangeWarning
from backpack_core.extensions import BatchL2Grad
from backpack_firstorder import squares


class Copied:
    """Stands for an event of another device."""

    def __init__(self, arrived: bool) -> None:
        self.arrived = arrived

    def query(self) -> bool:
        return self.arrived


def _pending(flag: bool, event: Copied) -> tuple[Any, ...]:
    return torch.tensor(flag), event, "key", "left the range"


def test_a_flag_is_looked_at_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Copied(arrived=False)
    monkeypatch.setattr(squares, "_pending", [_pending(True, event), _pending(False, Copied(True))])
    squares.warn_of_arrived()
    assert len(squares._pending) == 1
    event.arrived = True
    with pytest.warns(RangeWarning, match="left the range") as caught:
        squares.warn_of_arrived()
    assert caught[0].filename == __file__
    assert not squares._pending


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
