"""Sums over data sets that are drawn, by ways that are drawn, against one batch by autograd.

``make test ARGS="--nets=50000 tests/data/test_random_sums.py"`` draws 1,000 instead of a few.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from backpack_core.errors import BackpackError, InternalError
from tests.data.random_sums import Sum
from tests.data.truth import difference
from tests.drawn import REFUSED, judge, made

SHARE, LEAST = 50, 12


def fault_of(seed: int, folder: Path) -> str:
    """What is wrong with a sum, or that it was refused."""
    given = Sum(seed)
    try:
        found = given.found(folder)
    except InternalError as error:
        return f"{given.told}: {error}"
    except BackpackError:
        return REFUSED
    fault = difference(given, found)
    return f"{given.told}: {fault}" if fault else ""


def test_random_sums(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found = judge(request, SHARE, LEAST, lambda seed: fault_of(seed, made(tmp_path / str(seed))))
    assert found.count("") > len(found) / 2
