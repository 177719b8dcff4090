"""Stores that are filled in sessions that stop at any moment, and scores, drawn.

``make test ARGS="--nets=50000 tests/attribution/test_random_stores.py"`` draws 1,000.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.attribution.random_stores import fault_of

SHARE, LEAST = 50, 6


def test_random_stores(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first = request.config.getoption("--seed")
    count = max(LEAST, request.config.getoption("--nets") // SHARE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + count):
            folder = tmp_path / str(seed)
            folder.mkdir()
            fault = fault_of(seed, folder)
            assert not fault, fault
