"""Diagonals from pairs of positions, against the products themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backpack_core.extensions import BatchDiagGGNExact, DiagGGNExact, SqrtGGNExact
from backpack_products import contractions
from backpack_secondorder import position_pairs
from tests import oracle
from tests.secondorder.problems import Problem

COLUMNS, CLASSES = 29, 30


@pytest.mark.parametrize(
    ("positions", "groups", "features", "size"), [(1, 1, 3, 4), (5, 1, 3, 4), (4, 2, 3, 5)]
)
def test_pairs(
    positions: int, groups: int, features: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = torch.randn(7, 3, positions, groups, features)
    inp = torch.randn(3, positions, groups, size)
    whole = contractions.products(out, inp).square().sum(0)
    for cache in (position_pairs.CACHE, 500):  # all pairs at once, and some at a time
        monkeypatch.setattr(position_pairs, "CACHE", cache)
        oracle.assert_close(position_pairs.by_pairs(out, inp, is_summed=False), whole)
        oracle.assert_close(position_pairs.by_pairs(out, inp)[0], whole.sum(0))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many columns pairs were taken, at every call."""
    found: list[int] = []
    original = position_pairs.by_pairs

    def counted(out: Any, *others: Any, **options: Any) -> Any:
        found.append(len(out))
        return original(out, *others, **options)

    monkeypatch.setattr(position_pairs, "by_pairs", counted)
    return found


def problem(classes: int = CLASSES) -> Problem:
    """A convolution with few positions, and many weights."""
    net = nn.Sequential(
        nn.Conv2d(16, 16, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, classes, bias=False)
    )
    target = torch.randint(0, classes, (2,))
    return Problem(net, (torch.randn(2, 16, 4, 4),), nn.CrossEntropyLoss(), target)


@pytest.mark.parametrize("is_together", [False, True])
def test_many_columns(taken: list[int], is_together: bool) -> None:
    case = problem()
    expected = case.expected(oracle.ggn_diagonals)
    kinds = (DiagGGNExact, BatchDiagGGNExact)
    for extensions in [kinds] if is_together else [kinds[:1], kinds[1:]]:
        case.run(*(kind() for kind in extensions), check="never")
    case.compare("diag_ggn_exact", [d.sum(0) for d in expected])
    case.compare("diag_ggn_exact_batch", expected)
    assert taken == [COLUMNS] if is_together else [COLUMNS, COLUMNS]


def test_where_pairs_cost_more(taken: list[int]) -> None:
    problem(3).run(DiagGGNExact(), check="never")
    problem().run(DiagGGNExact(chunk_size=4), check="never")
    problem().run(DiagGGNExact(), SqrtGGNExact(), check="never")  # there, products exist anyway
    assert not taken


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("positions", [4, 16])
def test_positions_that_cancel(positions: int, mean: float) -> None:
    """Columns add up to nothing over positions, as for keys of attention, and inputs are alike."""
    out = torch.randn(32, 8, positions, 2, 6)
    out = (out - out.mean(2, keepdim=True)).float()
    inp = (torch.randn(8, positions, 2, 5) + mean).float()
    each = contractions.products(out.double(), inp.double()).square().sum(0)
    with torch.no_grad():
        found = [position_pairs.by_pairs(out, inp, is_summed=i == 0) for i in (0, 1)]
    for mine, expected in zip(found, (each.sum(0, keepdim=True), each), strict=True):
        scale = expected.mean((2, 3), keepdim=True)
        torch.testing.assert_close(mine.double() / scale, expected / scale, rtol=0, atol=1e-3)
