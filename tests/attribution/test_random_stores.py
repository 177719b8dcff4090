"""Stores that are filled in sessions that stop at any moment, and scores, drawn.

``make test ARGS="--nets=50000 tests/attribution/test_random_stores.py"`` draws 1,000.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attribution.random_stores import fault_of
from tests.drawn import judge, made

SHARE, LEAST = 50, 6


@pytest.mark.host("rows that are read from a store are there")
def test_random_stores(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    judge(request, SHARE, LEAST, lambda seed: fault_of(seed, made(tmp_path / str(seed))))
