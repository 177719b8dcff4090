"""Nets of tokens that are drawn: gradients of samples and of tokens, in every form.

``make test ARGS="--nets=50000 tests/firstorder/test_random_tokens.py"`` draws 2,000.
"""

from __future__ import annotations

import pytest

from tests.firstorder.random_tokens import fault_of

SHARE, LEAST = 25, 12


def test_random_tokens(request: pytest.FixtureRequest) -> None:
    first = request.config.getoption("--seed")
    count = max(LEAST, request.config.getoption("--nets") // SHARE)
    faults = [fault_of(seed) for seed in range(first, first + count)]
    assert {*faults} <= {"", "refused"}, [*filter(None, faults)]
    assert faults.count("") > count / 2
