"""Threads that do at once what is drawn.

``make test ARGS="--nets=50000 tests/core/test_random_threads.py"`` draws 660.
"""

from __future__ import annotations

import warnings

import pytest

from tests.core.random_threads import ACTIONS, Thread, made, run
from tests.drawn import judge

SHARE, LEAST, COUNT, THREADS = 75, 4, 12, 3


def test_random_threads(request: pytest.FixtureRequest) -> None:
    judge(request, SHARE, LEAST, lambda seed: run(seed, COUNT, THREADS) or "")


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_alone(name: str) -> None:
    thread = Thread(0, 0, made())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ACTIONS[name](thread)
        thread.run(0)
