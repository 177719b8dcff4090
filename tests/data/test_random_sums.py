"""Sums over data sets that are drawn, by ways that are drawn, against one batch by autograd.

``make test ARGS="--nets=50000 tests/data/test_random_sums.py"`` draws 1,000 instead of a few.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from backpack_core.errors import BackpackError, InternalError
from tests.data.random_sums import Sum
from tests.data.truth import difference

SHARE, LEAST = 50, 12


def fault_of(seed: int, folder: Path) -> tuple[str, str]:
    """What is wrong with a sum, and why it was refused."""
    given = Sum(seed)
    try:
        found = given.found(folder)
    except InternalError as error:
        return f"{given.told}: {error}", ""
    except BackpackError as error:
        return "", f"{given.told}: {type(error).__name__}: {error}"
    fault = difference(given, found)
    return (f"{given.told}: {fault}" if fault else ""), ""


def test_random_sums(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first = request.config.getoption("--seed")
    count = max(LEAST, request.config.getoption("--nets") // SHARE)
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + count):
            folder = tmp_path / str(seed)
            folder.mkdir()
            fault, refusal = fault_of(seed, folder)
            assert not fault, fault
            refused += bool(refusal)
    assert refused < count / 2
