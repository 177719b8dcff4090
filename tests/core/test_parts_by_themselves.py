"""Parts of a model that a script calls one by one, each with some of the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, ClippedSumGrad, SumGradSquared
from tests.oracle import assert_close

BOUND, SAMPLES = 0.1, 9


class Heads(nn.Module):
    """A body, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)


def loss_of(model: Any, lossfuncs: list[Any], x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    hidden = torch.tanh(model.body(x))
    terms = zip(lossfuncs, (model.first, model.second), (chosen, ~chosen), strict=True)
    return sum((loss(head(hidden[m]), y[m]) for loss, head, m in terms), torch.zeros(()))


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("is_function", [False, True])
def test_each_sample_has_one_head(count: int, is_whole: bool, is_function: bool) -> None:
    torch.manual_seed(count)
    model, x, y = Heads(), torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3
    chosen = torch.zeros(SAMPLES, dtype=torch.bool)
    chosen[torch.randperm(SAMPLES)[:count]] = True
    parameters = list(model.parameters())
    plain, expected = nn.CrossEntropyLoss(reduction="sum"), []
    for n in range(SAMPLES):
        own = slice(n, n + 1)
        loss = loss_of(model, [plain, plain], x[own], y[own], chosen[own])
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        expected.append(torch.cat([g.flatten() for g in found]))
    rows = torch.stack(expected)
    _ = extend(model) if is_whole else [extend(part) for part in model.children()]
    lossfuncs: list[Any] = [extend(nn.CrossEntropyLoss(reduction="sum")) for _ in range(2)]
    if is_function:
        lossfuncs = [lambda output, target: F.cross_entropy(output, target, reduction="sum")] * 2
    loss = loss_of(model, lossfuncs, x, y, chosen)
    with backpack(BatchGrad(), SumGradSquared(), ClippedSumGrad(BOUND, normaliser=None)):
        loss.backward()

    def joined(field: str, start: int) -> Tensor:
        return torch.cat([getattr(p, field).flatten(start) for p in parameters], start)

    assert_close(joined("grad_batch", 1), rows, 1e-5)
    assert_close(joined("sum_grad_squared", 0), rows.square().sum(0), 1e-5)
    weights = (BOUND / rows.norm(dim=1)).clamp(max=1)
    assert_close(joined("grad_clipped", 0), weights @ rows, 1e-5)
