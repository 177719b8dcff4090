"""Histories of optimizers against explicit matrices.

A few are drawn here. For a long run of 500, set ``SEEDS`` to 500.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from backpack_core.errors import BackpackError
from tests.drawn import Fault
from tests.optimizers.factored_histories import HAPPENINGS, History
from tests.optimizers.newton_histories import HAPPENINGS as OF_NEWTON
from tests.optimizers.newton_histories import NewtonHistory

SEEDS, BLOCKS = 8, 2
DIVERGED = "do not add up to the gradient that autograd brings"  # gradients are rounding errors


def fault_of(seed: int, kind: Any) -> str:
    """What is wrong in a history."""
    history = kind(seed)
    try:
        history.go()
    except (Fault, BackpackError) as error:
        if DIVERGED in str(error):
            return ""
        name = "" if isinstance(error, Fault) else f"{type(error).__name__}: "
        return f"seed {seed}, {history.told}: {name}{error}"
    return ""


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("kind", [History, NewtonHistory])
def test_histories(block: int, kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(block, SEEDS, BLOCKS):
            fault = fault_of(seed, kind)
            assert not fault, fault


@pytest.mark.parametrize("name", HAPPENINGS)
def test_everything_can_happen(name: str) -> None:
    history = History(3)
    HAPPENINGS[name](history)
    history.go()


@pytest.mark.parametrize("name", OF_NEWTON)
def test_everything_can_happen_to_newton(name: str) -> None:
    history = NewtonHistory(3)
    OF_NEWTON[name](history)
    history.go()
