"""What is planned in one pass holds in later ones, on random nets and with other data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backpack_operations.plan import Planned
from tests.nets.draw import draw
from tests.nets.truth import Unstable
from tests.nets.verdict import Prepared, judge

BLOCKS = 5


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Every net is judged by itself for what it leaves."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Planned]:
    """The plans that were taken."""
    found: list[Planned] = []
    fill = Planned.fill

    def noted(self: Planned, *given: Any) -> None:
        found.append(self)
        fill(self, *given)

    monkeypatch.setattr(Planned, "fill", noted)
    return found


def _nets(block: int, request: pytest.FixtureRequest) -> list[Prepared]:
    """Each runs three passes over other data before the one that counts."""
    first, nets = request.config.getoption("--seed"), request.config.getoption("--nets")
    found = []
    for seed in range(first + block, first + max(block + 1, nets // 3), BLOCKS):
        recipe = draw(seed).recipe
        try:
            found.append(Prepared(recipe.with_(plan=replace(recipe.plan, passes="unmeasured"))))
        except Unstable:
            continue
    return found


@pytest.mark.plans
@pytest.mark.parametrize("block", range(BLOCKS))
def test_planned_passes(block: int, planned: list[Planned], request: pytest.FixtureRequest) -> None:
    faults, taken, nets = list[str](), 0, _nets(block, request)
    for prepared in nets:
        planned.clear()
        verdict = judge(prepared)
        taken += bool(planned)
        if not verdict.passes:
            faults.append(f"{verdict.what}\n{verdict.details}\n{prepared.recipe}")
    assert not faults, "\n".join(faults[:5])
    assert taken or len(nets) < 10
