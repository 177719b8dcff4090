"""Judges what is drawn from seeds: a few, or as many as ``--nets`` says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from backpack_core.errors import BackpackError, InternalError

REFUSED = "refused"


class Fault(AssertionError):
    """What is wrong in what was drawn."""


def check_refused(call: Callable[[], object]) -> None:
    """It raises one of our errors."""
    try:
        call()
    except InternalError:
        raise
    except BackpackError:
        return
    raise Fault("nothing was raised")


def judge(
    request: pytest.FixtureRequest, share: int, least: int, fault_of: Callable[[int], str]
) -> list[str]:
    """Judge one seed after the other.

    Args:
        request: The test, which knows ``--nets`` and ``--seed``.
        share: One seed is drawn for so many nets.
        least: The fewest seeds.
        fault_of: What is wrong with a seed: nothing, or that it was refused, or a fault.

    Returns:
        What was found for each: nothing, or that it was refused.
    """
    first = request.config.getoption("--seed")
    count = max(least, request.config.getoption("--nets") // share)
    found = list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + count):
            found.append(fault_of(seed))
            assert found[-1] in ("", REFUSED), found[-1]
    return found


def made(folder: Path) -> Path:
    """A folder, once it is made."""
    folder.mkdir()
    return folder
