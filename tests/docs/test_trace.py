"""The page that follows one pass is true."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.trace import REPEATED, Step, numbers, trace
from tests import steps as verified

PAGE = Path(__file__).parents[2] / "docs" / "design" / "trace.md"


@pytest.fixture(autouse=True)
def _only_the_library() -> Iterator[None]:
    """What verifies steps in the suite is no part of a pass."""
    verified.switch_off()
    yield
    verified.switch_on()


def table() -> list[tuple[int, ...]]:
    rows = re.findall(r"^\|[^|]+\| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text("utf-8"), re.M)
    return [tuple(map(int, row)) for row in rows]


def test_numbers_of_the_page() -> None:
    """Up to a tenth, so that not every helper function changes the page."""
    found = trace()
    phases = [numbers(steps) for _, steps in found.phases()]
    repeated = numbers(trace(REPEATED).steps)
    pairs = list(zip(table(), [*phases, numbers(found.steps), repeated], strict=True))
    assert len(pairs) == 8
    for expected, counted in pairs:
        for one, other in zip(expected, counted, strict=True):
            assert abs(one - other) <= 1 + one // 10, (expected, counted)


def called(steps: list[Step]) -> Counter[str]:
    return Counter(f"{Path(step.file).stem}.{step.name.rsplit('.', 1)[-1]}" for step in steps)


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, "traversal.visit straight.arrive traversal.read traversal.find traversal.sent"),
        (1, "column_propagator.propagate rules.jac_t_mat_prod linear._jac_t_mat_prod"),
        (1, "column_propagator.products parametric.param_products sink.note"),
        (2, "parametric.arrangement diag_ggn.read guards.unshared sink.store"),
    ],
)
def test_a_visit_does_each_thing_once(count: int, names: str) -> None:
    """Once for the group, and once for each of its two parameters."""
    phases = list(trace().phases())
    assert [name for name, _ in phases] == ["start", *["visit"] * 4, "end"]
    calls = called(phases[2][1])
    assert {name: calls[name] for name in names.split()} == dict.fromkeys(names.split(), count)


def test_functions_of_the_page_are_called() -> None:
    names = {part for step in trace().steps for part in step.name.split(".")}
    files = {Path(step.file).stem for step in trace().steps}
    quoted = re.findall(r"`([A-Za-z_.]+)`", PAGE.read_text("utf-8").partition("## Start")[2])
    known = {"Linear", "ReLU", "Site", "contract", "engine", "record", "BackwardPass"}
    assert len(quoted) > 20
    for text in set(quoted) - known:
        for part in text.split("."):
            assert part in names | files | known, text
