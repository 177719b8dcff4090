"""Training loops that are drawn: captured steps are those of the engine, whatever changes.

``make test ARGS="--nets=50000 tests/capture/test_random_loops.py"`` draws 660.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture import random_hosts
from tests.capture.random_hosts import HostWorld
from tests.capture.random_loops import CHANGES, GLOBAL, World
from tests.drawn import judge

SHARE, LEAST, STEPS = 75, 4, 40


def fault_of_host(seed: int) -> str:
    """What differs in a loop in the blocks of another object."""
    worlds = []
    for is_captured in (False, True):
        torch.manual_seed(seed)
        worlds.append(HostWorld(Random(seed), is_captured))
    draw, told = Random(seed), [seed, *worlds[0].told]
    for number in range(STEPS):
        name = draw.choice([*random_hosts.CHANGES]) if number and draw.random() < 0.2 else ""
        told += [name, number] if name else [number]
        for world in worlds if name else ():
            torch.manual_seed(number)
            random_hosts.CHANGES[name](world, Random(number))
        if fault := _difference(*(world.go_on(seed + number) for world in worlds)):
            return f"{told}: {fault}"
    return ""


def fault_of(seed: int) -> tuple[str, int]:
    """What differs in a loop, and how many steps were replayed."""
    worlds = []
    for is_captured in (False, True):
        torch.manual_seed(seed)
        worlds.append(World(Random(seed), is_captured))
    draw, told = Random(seed), [seed, *worlds[0].told]
    for number in range(STEPS):
        name = draw.choice([*CHANGES]) if number and draw.random() < 0.2 else ""
        if name:
            told.append(name)
        told.append(number)
        found = []
        for world in worlds:
            if name:
                torch.manual_seed(number)
                CHANGES[name](world, Random(number))
            GLOBAL["factor"] = getattr(world, "shared", 1.0)
            found.append(world.go_on(world.kind, seed + number))
        if fault := _difference(*found):
            return f"{told}: {fault}", 0
    replayed = sum("replays" in step.report() for step in worlds[1].steps.values())
    return "", replayed


def _difference(right: dict[str, Any], ours: dict[str, Any]) -> str:
    for key in {**right, **ours}:
        if not _same(right.get(key), ours.get(key)):
            return f"{key} is {ours.get(key)} instead of {right.get(key)}"
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.long
def test_random_loops_of_hosts(request: pytest.FixtureRequest) -> None:
    judge(request, SHARE, LEAST, fault_of_host)


def test_random_loops(request: pytest.FixtureRequest) -> None:
    replayed = list[int]()

    def fault(seed: int) -> str:
        found, times = fault_of(seed)
        replayed.append(times)
        return found

    judge(request, SHARE, LEAST, fault)
    assert any(replayed)
