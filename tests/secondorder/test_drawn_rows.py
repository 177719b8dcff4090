"""Sampled curvature of losses with several rows for each sample, as of language models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import (
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    DiagGGNExact,
    DiagGGNMC,
    SqrtGGNMC,
)
from tests import oracle
from tests.secondorder.factors import SAMPLED_RTOL, SAMPLES

N, T, D = 2, 3, 4

# How the rows of all samples come to the loss, from ``[N, T, C]``; targets are moved likewise.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "in a row": lambda x: x.flatten(0, 1),
    "time first": lambda x: x.transpose(0, 1).flatten(0, 1),
    "some": lambda x: x[torch.tensor([[True, True, False], [False, True, False]])],
    "by position": lambda x: x,
}


class Tokens(nn.Module):
    """Tokens of one sample influence each other; the head may be narrower than the classes."""

    def __init__(self, width: int, classes: int, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, width), nn.Linear(width, width)
        self.head, self.move = nn.Linear(width, classes), move

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(self.move(torch.tanh(self.second(h + 2 * h.mean(1, keepdim=True)))))


def _step(rows: str, loss: str, width: int, *extensions: Any) -> list[Any]:
    """The parameters of a net with tokens, after a pass."""
    torch.manual_seed(0)
    classes = 7 if loss == "classes" else 2
    move = ROWS[rows]
    model = extend(Tokens(width, classes, move).double())
    x = torch.randn(N, T, D, dtype=torch.float64)
    out = model(x)
    if loss == "classes":
        out = out.transpose(1, 2) if rows == "by position" else out
        lossfunc: nn.Module = nn.CrossEntropyLoss()
        target: Tensor = move(torch.randint(classes, (N, T)))
    else:
        lossfunc, target = nn.MSELoss(reduction="sum"), torch.zeros_like(out)
    with backpack(*extensions):
        extend(lossfunc)(out, target).backward()
    return [*model.parameters()]


@pytest.mark.parametrize("width", [2, 5])  # the narrow head has fewer inputs than classes
@pytest.mark.parametrize("loss", ["classes", "squares"])
@pytest.mark.parametrize("rows", ROWS)
def test_drawn_columns_are_right_in_expectation(rows: str, loss: str, width: int) -> None:
    exact = DiagGGNExact(), BatchDiagGGNExact(), KFLR()
    for p in _step(rows, loss, width, *exact, *(e(SAMPLES) for e in (DiagGGNMC, KFAC))):
        oracle.assert_close(p.diag_ggn_mc, p.diag_ggn_exact, SAMPLED_RTOL)
        for sampled, right in zip(p.kfac, p.kflr, strict=True):
            oracle.assert_close(sampled, right, SAMPLED_RTOL)
    for p in _step(rows, loss, width, BatchDiagGGNExact(), BatchDiagGGNMC(SAMPLES)):
        oracle.assert_close(p.diag_ggn_mc_batch, p.diag_ggn_exact_batch, SAMPLED_RTOL)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("draws", [1, 2])
def test_there_is_one_column_for_each_draw(draws: int, rows: str) -> None:
    """A sample's column spans all of its rows, however many they are."""
    for p in _step(rows, "classes", 5, SqrtGGNMC(draws)):
        assert p.sqrt_ggn_mc.shape == (draws, N, *p.shape)
