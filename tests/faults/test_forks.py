"""Processes of tests that hang or die fail their test, and the next one runs."""

from __future__ import annotations

import time

import pytest

from tests import forks


def hang(rank: int) -> None:
    time.sleep(100 * rank)


def test_scripts() -> None:
    assert forks.python("import os; print(os.environ['A'], end='')", A="b") == "b"
    assert forks.python("") == ""
    with pytest.raises(AssertionError, match=r"ended with 1: (.|\n)*ValueError: why"):
        forks.python("raise ValueError('why')")
    with pytest.raises(AssertionError, match="The script took 1 seconds"):
        forks.python("import time; time.sleep(100)", limit=1)


def test_a_server_that_has_died_is_replaced() -> None:
    forks.python("")
    forks._server().kill()
    with pytest.raises(AssertionError, match="The server has ended with -9"):
        forks.python("")
    assert forks.python("print(1)") == "1\n"


def test_ranks_that_hang() -> None:
    with pytest.raises(TimeoutError, match=r"Ranks \[1\] were not through after 3 seconds"):
        forks.run_ranks(hang, limit=3)
