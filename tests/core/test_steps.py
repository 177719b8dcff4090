"""Steps that are not what they have to be are seen, in every pass of the suite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_products import ColumnPropagator
from backpack_products.columns import Columns
from tests.steps import NotAsItHasToBe


def _run(*extensions: Any) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    lossfunc = extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(5, 3)).relu(), torch.rand(5, 2))
    with backpack(*extensions, check="never"):
        loss.backward()


def test_a_column_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ColumnPropagator.cross

    def wrong(self: Any, *given: Any) -> list[tuple[int, Columns]]:
        return [(i, columns.to(torch.float32)) for i, columns in right(self, *given)]

    _run(DiagGGNExact())
    monkeypatch.setattr(ColumnPropagator, "cross", wrong)
    with pytest.raises(NotAsItHasToBe, match="float32"):
        _run(DiagGGNExact())


def test_a_column_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ColumnPropagator.cross

    def wrong(self: Any, *given: Any) -> list[tuple[int, Columns]]:
        def wider(mat: Tensor) -> Tensor:
            return torch.cat([mat, mat], -1)

        return [(i, columns.map(wider)) for i, columns in right(self, *given)]

    monkeypatch.setattr(ColumnPropagator, "cross", wrong)
    with pytest.raises(NotAsItHasToBe, match="shape"):
        _run(DiagGGNExact())


def test_all_is_well_where_nothing_is_wrong() -> None:
    _run(BatchGrad(), DiagGGNExact())
