"""Nets with derivatives of nets in them are exact, whatever lengths agree: none may be refused."""

from __future__ import annotations

from random import Random

import pytest

from tests.nets.catalogue import KINDS
from tests.nets.kinds import Unfit
from tests.nets.recipe import Request
from tests.nets.test_found import GRADIENTS, chain
from tests.nets.truth import Unstable
from tests.nets.verdict import Prepared, judge


def _drawn(seed: int) -> Prepared:
    """Between two layers, with few different lengths."""
    random = Random(seed)
    while True:
        batch = random.randint(1, 5)
        shape = tuple(random.choice([2, 3, 4, batch]) for _ in range(random.randint(1, 3)))
        try:
            settings = KINDS["Derivative"].draw(random, ((*shape[:-1], 3 + seed % 2),))
            # Of a copy, nothing tells whose its entries are but lengths that differ.
            settings["attached"] |= batch in (*shape[:-1], 3 + seed % 2)
            first = ("Linear", {"out": 3 + seed % 2, "bias": True})
            last = ("Linear", {"out": 2, "bias": False})
            asked = (*GRADIENTS, Request("DiagGGNExact"))
            calls = first, ("Derivative", settings), last
            return Prepared(chain(*calls, shape=shape, batch=batch, ask=asked))
        except (Unfit, Unstable):
            continue


@pytest.mark.grid(3)
@pytest.mark.parametrize("seed", range(60))
def test_derivatives(seed: int) -> None:
    verdict = judge(_drawn(seed))
    assert verdict.outcome == "exact", verdict
