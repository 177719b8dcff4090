"""Random nets: exact, or refused with an error of the library; never anything else.

A net follows from its seed: ``--nets=1 --seed=...`` shows a fault again. For a long run,
``make test ARGS="--nets=20000 tests/nets"``. It prints what became of all nets, and by what errors
they were refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.nets.draw import draw, draw_with_trap
from tests.nets.report import tally
from tests.nets.verdict import Prepared

# The share of a block that may be refused. Not a wish: it is there so that a rise is noticed.
REFUSED = 0.45
BLOCKS = 10
LARGEST_BLOCK = 250


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Every net is judged by itself for what it leaves."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    option = "--traps" if "trap" in metafunc.function.__name__ else "--nets"
    first, count = metafunc.config.getoption("--seed"), metafunc.config.getoption(option)
    size = min(LARGEST_BLOCK, max(1, -(-count // BLOCKS)))
    blocks: list[Any] = [
        range(s, min(s + size, first + count)) for s in range(first, first + count, size)
    ]
    ids = [f"{block[0]}-{block[-1]}" for block in blocks]
    if not blocks:
        skip = pytest.mark.skip(reason=f"runs with {option}=N")
        blocks, ids = [pytest.param(range(0), marks=skip)], ["none"]
    metafunc.parametrize("seeds", blocks, ids=ids)


def check(
    kind: str,
    drawn: Callable[[int], Prepared],
    seeds: range,
    record: Callable[[str, object], None],
) -> float:
    """Judge a block and report it; the share of refusals."""
    result = tally(drawn, seeds)
    record(kind, result.as_data())
    if result.faults:
        pytest.fail("\n".join(result.faults), pytrace=False)
    return result.refused


def test_nets(seeds: range, record_property: Callable[[str, object], None]) -> None:
    refused = check("nets", draw, seeds, record_property)
    assert refused <= REFUSED or len(seeds) < 20


def test_nets_with_a_trap(seeds: range, record_property: Callable[[str, object], None]) -> None:
    check("traps", draw_with_trap, seeds, record_property)
