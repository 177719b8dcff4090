"""Experts that are frozen: autograd saves less where their rows are written among others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend, unextend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle

Write = Callable[[Tensor, Tensor, Tensor], Tensor]


def _put(out: Tensor, which: Tensor, rows: Tensor) -> Tensor:
    out[which] = rows
    return out


WRITES: dict[str, Write] = {
    "index_add": lambda out, which, rows: out.index_add(0, which, rows),
    "index_copy": lambda out, which, rows: out.index_copy(0, which, rows),
    "index_put": _put,
    "scatter_add": lambda out, which, rows: out.scatter_add(
        0, which.unsqueeze(1).expand_as(rows), rows
    ),
}


class Mixture(nn.Module):
    """Each sample goes to one expert."""

    def __init__(self, write: Write, has_first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3) if has_first else nn.Identity()
        self.experts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.last, self.write = nn.Linear(3, 2), write

    def forward(self, x: Tensor) -> Tensor:
        hidden, number, out = self.first(x), (x.sum(1) > 0).long(), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            which = torch.where(number == k)[0]
            out = self.write(out, which, expert(hidden[which]))
        result: Tensor = self.last(out.tanh())
        return result


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("has_first", [False, True], ids=["input", "layer"])
@pytest.mark.parametrize("name", WRITES)
def test_frozen_experts(name: str, has_first: bool, frozen: tuple[int, ...]) -> None:
    model, lossfunc = Mixture(WRITES[name], has_first), extend(nn.MSELoss())
    for k in frozen:
        model.experts[k].requires_grad_(False)
    plain = unextend(copy.deepcopy(model))
    extend(model)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    x[:3] = x[:3].abs()
    x[3:] = -x[3:].abs()
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(x), y).backward()
    trained = [p for p in plain.parameters() if p.requires_grad]
    loss = lambda output: nn.functional.mse_loss(output, y)  # noqa: E731
    rows = oracle.individual_gradients(plain, loss, [x], trained)
    diagonals = oracle.ggn_diagonals(plain, loss, [x], trained)
    ours = [p for p in model.parameters() if p.requires_grad]
    for parameter, each, diagonal in zip(ours, rows, diagonals, strict=True):
        oracle.assert_close(parameter.grad_batch, each)
        oracle.assert_close(parameter.diag_ggn_exact, diagonal.sum(0))
