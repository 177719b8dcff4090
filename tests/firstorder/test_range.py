"""Warnings of squares that leave the range of numbers, where looking at them means to wait."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from backpack_core.errors import RangeWarning
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
