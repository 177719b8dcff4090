"""Nets of tokens that are drawn: gradients of samples and of tokens, in every form.

``make test ARGS="--nets=50000 tests/firstorder/test_random_tokens.py"`` draws 2,000.
"""

from __future__ import annotations

import pytest

from tests.drawn import judge
from tests.firstorder.random_tokens import fault_of

SHARE, LEAST = 25, 12


def test_random_tokens(request: pytest.FixtureRequest) -> None:
    found = judge(request, SHARE, LEAST, fault_of)
    assert found.count("") > len(found) / 2
