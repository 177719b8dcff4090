"""What is computed from other parameters, where autograd is told to leave these out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact


def _values(model: nn.Module, gradient: Any = "autograd", **options: Any) -> list[Tensor]:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    loss = extend(nn.CrossEntropyLoss())(model(x), torch.tensor([0, 2]))
    with backpack(BatchGrad(), DiagGGNExact(), gradient=gradient, check="never"):
        loss.backward(**options)
    found = [(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()]  # type: ignore[attr-defined]
    return [value for pair in found for value in pair]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 3), nn.Tanh(), weight_norm(nn.Linear(3, 3))
    made: nn.Sequential = extend(nn.Sequential(*layers).double())
    return made


@pytest.mark.parametrize("gradient", ["none", "skipped"])
def test_values_do_not_hang_on_the_plain_gradient(model: nn.Sequential, gradient: str) -> None:
    wanted = _values(model)
    model.zero_grad()
    found = _values(model, gradient)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(value.any() for value in wanted)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [False, True])
def test_values_do_not_hang_on_inputs(model: nn.Sequential, create_graph: bool) -> None:
    wanted = _values(model, create_graph=create_graph)
    found = _values(model, inputs=[model[0].weight], create_graph=create_graph)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        assert one.requires_grad == create_graph
