"""The Hessian's diagonal in parameters that others are computed from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchDiagHessian, DiagHessian
from backpack_products.tuning import memory_budget, set_memory_budget
from tests import oracle


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Square(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", 0.4)


def symmetric(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pruned(nn.Linear(3, 3)), pruned(nn.Linear(3, 3))
        self.second.weight_orig = self.first.weight_orig

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), torch.tanh(self.second(x))], 1)


class Times(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(2, width))

    def forward(self, weight: Tensor) -> Tensor:
        return weight[:, :2] @ self.factor


class Twice(nn.Module):
    """One layer twice, side by side; its weight is computed anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        parametrize.register_parametrization(self.layer, "weight", Times(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * torch.sigmoid(self.layer(x.square()))


def diagonals(model: nn.Module, loss: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    found = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        rows = [
            torch.autograd.grad(g, parameter, retain_graph=True, materialize_grads=True)[0]
            for g in gradient.flatten()
        ]
        found.append(torch.stack(rows).flatten(1).diagonal().reshape(parameter.shape))
    return found


NETS = {
    "pruned": lambda: nn.Sequential(pruned(nn.Linear(3, 4)), nn.Sigmoid(), pruned(nn.Linear(4, 2))),
    "symmetric": lambda: nn.Sequential(symmetric(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        pruned(nn.Conv1d(1, 2, 2)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4, 2),
    ),
    "one of several layers": lambda: nn.Sequential(Beside(), nn.Linear(6, 2)),
    "a layer used twice": lambda: nn.Sequential(Twice(), nn.Linear(3, 2)),
}


@pytest.mark.parametrize("budget", [1, 2**26])
@pytest.mark.parametrize("net", NETS)
def test_linear(net: str, budget: int) -> None:
    torch.manual_seed(0)
    model, lossfunc = extend(NETS[net]().double()), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    expected = diagonals(model, lossfunc(model(x), y))
    before = memory_budget()
    set_memory_budget(budget)
    try:
        with backpack(DiagHessian(), BatchDiagHessian()):
            lossfunc(model(x), y).backward()
    finally:
        set_memory_budget(before)
    for parameter, diagonal in zip(model.parameters(), expected, strict=True):
        oracle.assert_close(parameter.diag_h, diagonal)  # type: ignore[attr-defined]
        oracle.assert_close(parameter.diag_h_batch.sum(0), diagonal)  # type: ignore[attr-defined]


def squared(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Square())
    return layer


@pytest.mark.parametrize("computed", [parametrizations.weight_norm, squared])
def test_nonlinear(computed) -> None:
    """A factor that is the parameter itself is no constant."""
    model, lossfunc = extend(nn.Sequential(computed(nn.Linear(3, 2)))), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2))
    with (
        pytest.raises(UnsupportedError, match=r"not known to be linear.*DiagHMP"),
        backpack(DiagHessian()),
    ):
        loss.backward()


def test_used_behind_its_own_use() -> None:
    layer = symmetric(nn.Linear(3, 3, bias=False))
    model, lossfunc = extend(nn.Sequential(layer, nn.Tanh(), layer)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 3))
    with (
        pytest.raises(UnsupportedError, match=r"used again on the way to its own use"),
        backpack(DiagHessian()),
    ):
        loss.backward()
