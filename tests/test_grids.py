"""Which cases of a large grid run without ``--grids=whole``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import is_drawn


class Case:
    """A collected test, as far as the choice looks at it."""

    def __init__(self, number: int, *marks: Any) -> None:
        self.nodeid, self.marks = f"tests/test_some.py::test_it[{number}]", marks

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)


def test_a_share_of_a_grid_runs_and_every_other_test() -> None:
    mark = pytest.mark.grid(4).mark
    drawn = [number for number in range(400) if is_drawn(Case(number, mark))]  # type: ignore[arg-type]
    assert 60 < len(drawn) < 140
    assert drawn == [n for n in range(400) if is_drawn(Case(n, mark))]  # type: ignore[arg-type]
    assert all(is_drawn(Case(number)) for number in range(20))  # type: ignore[arg-type]
