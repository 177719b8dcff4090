"""What the report on a model says agrees with what happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core import plugins
from backpack_core.cli.support import judge
from backpack_core.plugins.registry import registry


class Odd(nn.Module):
    """No rule knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


CASES = [
    (nn.Linear(2, 2), "BatchGrad", "rule"),
    (nn.Linear(2, 2), "SumGradSquared", "fast"),
    (nn.Linear(2, 2), "KFAC", "fast"),
    (nn.Linear(2, 2, bias=False), "KFAC", "fast"),
    (nn.Linear(2, 2).requires_grad_(False), "BatchGrad", "-"),
    (nn.Linear(2, 2).requires_grad_(False), "DiagGGNExact", "rule"),
    (nn.ReLU(), "BatchGrad", "-"),
    (nn.ReLU(), "DiagGGNExact", "rule"),
    (nn.MSELoss(), "BatchGrad", "-"),
    (nn.MSELoss(), "DiagGGNExact", "rule"),
    (nn.LayerNorm(2), "Variance", "rule"),
    (nn.LayerNorm(2), "KFAC", "rule"),
    (nn.Embedding(2, 2), "SumGradSquared", "fast"),
    (nn.Embedding(2, 2), "KFAC", "refused"),
    (nn.GRU(2, 2, batch_first=True), "KFAC", "fast"),
    (nn.GRU(2, 2, batch_first=True), "DiagHessian", "refused"),
    (nn.Linear(2, 2), "DiagHessian", "fast"),
    (nn.Linear(2, 2), "GGNMP", "graph"),
    (nn.MSELoss(), "PCHMP", "graph"),
    (nn.GRU(2, 2, batch_first=True), "HMP", "graph"),
    (nn.GRU(2, 2, batch_first=True), "PCHMP", "graph"),
    (nn.GRU(2, 2, batch_first=True).requires_grad_(False), "DiagHessian", "rule"),
    (nn.BatchNorm1d(2).train(), "GGNMP", "graph"),
    (nn.BatchNorm1d(2).train(), "PCHMP", "refused"),
    (Odd(), "HMP", "graph"),
    (nn.BatchNorm1d(2).train(), "BatchGrad", "refused"),
    (nn.BatchNorm1d(2).eval(), "BatchGrad", "rule"),
    (Odd(), "BatchGrad", "autodiff"),
    (Odd(), "DiagGGNExact", "autodiff"),
    (Odd(), "DiagHessian", "refused"),
    (Odd(), "KFAC", "refused"),
]


@pytest.mark.parametrize(
    ("module", "extension", "expected"), CASES, ids=lambda v: v if isinstance(v, str) else repr(v)
)
def test_status(module: nn.Module, extension: str, expected: str) -> None:
    plugins.ensure_loaded()
    kind = registry.extensions[extension][0].value
    assert judge(module, kind)[0] == expected
