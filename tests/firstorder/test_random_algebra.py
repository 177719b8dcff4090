"""Expressions of individual gradients that are drawn, against tensors.

``make test ARGS="--nets=50000 tests/firstorder/test_random_algebra.py"`` draws 10,000.
"""

from __future__ import annotations

import pytest

from tests.drawn import judge
from tests.firstorder.random_algebra import Algebra

SHARE, LEAST, STEPS = 5, 60, 8


def fault_of(seed: int) -> str:
    """What is wrong with an expression."""
    given = Algebra(seed)
    for _ in range(STEPS):
        if fault := given.go_on():
            return f"{given.told}: {fault}"
    return ""


def test_random_algebra(request: pytest.FixtureRequest) -> None:
    judge(request, SHARE, LEAST, fault_of)
