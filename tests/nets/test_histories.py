"""Training loops in which anything may change between passes, against plain autograd.

A fiftieth of ``--nets`` is drawn; for a long run of 1,000,
``make test ARGS="--nets=50000 tests/nets/test_histories.py"``.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from backpack_capture import visits
from tests.nets.histories import CHANGES, PARTS, History

PASSES = 40
SHARE, BLOCKS = 50, 2


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Histories keep their models until they end."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded soon, since something changes after a few."""
    monkeypatch.setattr(visits, "FIRST", 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    first = metafunc.config.getoption("--seed")
    count = max(3 * BLOCKS, metafunc.config.getoption("--nets") // SHARE)
    seeds = [range(first + block, first + count, BLOCKS) for block in range(BLOCKS)]
    metafunc.parametrize("seeds", seeds, ids=[str(block) for block in range(BLOCKS)])


def fault_of(seed: int, is_captured: bool) -> tuple[str, int]:
    """What is wrong in a history, and how many passes were repeated or replayed."""
    history = History(seed, is_captured)
    for number in range(PASSES):
        if fault := history.go_on(number):
            return f"seed {seed}, {history.told}: {fault}, {history.names}\n{history.model}", 0
    return "", history.repeated


@pytest.mark.parametrize("is_captured", [False, True], ids=["engine", "captured"])
def test_histories(seeds: range, is_captured: bool, request: pytest.FixtureRequest) -> None:
    repeated = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            fault, count = fault_of(seed, is_captured)
            assert not fault, fault
            repeated += count
    assert repeated or request.config.getoption("--plans") != "on"


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_can_be_made(name: str) -> None:
    history = History(3, is_captured=False)
    assert not history.go_on(0)
    CHANGES[name](history)
    assert not history.go_on(0)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_keeps_its_shape(name: str) -> None:
    assert PARTS[name](4)(torch.randn(3, 4)).shape == (3, 4)
