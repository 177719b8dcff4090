"""Results of earlier passes are removed, also if another model or another module stored them."""

from __future__ import annotations

import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad


def _backward(model: nn.Module) -> None:
    output = model(torch.randn(5, 4))
    loss = extend(nn.MSELoss())(output, torch.randn_like(output))
    with backpack(BatchGrad(), check="never"):
        loss.backward()


def test_of_a_model_that_shares_a_part() -> None:
    """Each model is trained in turn, and one of them with the shared part frozen."""
    trunk = nn.Linear(4, 6)
    one, two = (extend(nn.Sequential(trunk, nn.Linear(6, width))) for width in (3, 2))
    for _ in range(4):
        trunk.requires_grad_(False)
        _backward(one)
        assert not hasattr(trunk.weight, "grad_batch")
        trunk.requires_grad_(True)
        _backward(two)
        assert trunk.weight.grad_batch.shape == (5, 6, 4)


def test_of_a_model_and_a_function_that_use_the_same_parameters() -> None:
    """Between them, the model has stored results on more."""
    early, late = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
    model = extend(nn.Sequential(early, late))
    for _ in range(4):
        early.requires_grad_(True)
        _backward(model)
        assert hasattr(early.weight, "grad_batch")
        _backward(_Multiplied(late.weight))
        early.requires_grad_(False)
        _backward(model)
        assert not hasattr(early.weight, "grad_batch")


class _Choice(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_of_parameters_that_changed_places() -> None:
    """Passes have the same structure, but not the same parameters."""
    model = extend(_Choice())
    for _ in range(4):
        _backward(model)
        assert hasattr(model.used.weight, "grad_batch")
        assert not hasattr(model.other.weight, "grad_batch")
        for name in ("weight", "bias"):
            own, its = getattr(model.used, name), getattr(model.other, name)
            setattr(model.used, name, its), setattr(model.other, name, own)


def test_of_a_function_of_another_models_parameters() -> None:
    """A pass over a frozen model follows one that used its parameters by a function."""
    model, head = extend(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))), extend(nn.Linear(3, 2))
    frozen = model[0].requires_grad_(False).weight
    for _ in range(4):
        frozen.requires_grad_(False)
        _backward(model)
        assert not hasattr(frozen, "grad_batch")
        frozen.requires_grad_(True)
        _backward(nn.Sequential(_Multiplied(frozen), head))
        assert frozen.grad_batch.shape == (5, 3, 4)


class _Multiplied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.__dict__["weight"] = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T
