"""Modules that call themselves: what a call inside has is not that of the call around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from backpack_core import extend
from tests.cases import Problem, classification

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


class Nested(nn.Module):
    """Its parameter before and behind a call of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if not depth:
            return x * self.weight
        result: Tensor = self(torch.sin(x * self.weight), depth - 1) * self.weight
        return result


class Repeated(nn.Linear):
    """No layer rule, since its forward is another one than its parent's."""

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        y = super().forward(x)
        return self(torch.tanh(y), depth - 1) if depth else y


class Mutual(Nested):
    """Calls another module, which is no part of it, and calls it again."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = x * self.weight
        result: Tensor = self.__dict__["other"](torch.sin(y), depth - 1) if depth else y
        return result


class Square(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.square() + 1


def mutual() -> nn.Module:
    first, second = Mutual(), Mutual()
    first.__dict__["other"], second.__dict__["other"] = second, first
    return nn.Sequential(first, second)


def with_a_copy() -> nn.Module:
    """A shallow one, which has the same table of parameters."""
    first = Mutual()
    second = copy.copy(first)
    first.__dict__["other"], second.__dict__["other"] = second, first
    extend(second)
    return first


def parametrized(module: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", Square())


NETS = {
    "nested": Nested,
    "without a rule": lambda: Repeated(3, 3),
    "mutual": mutual,
    "copied": with_a_copy,
    "parametrized": lambda: parametrized(Nested()),
    "parametrized, without a rule": lambda: parametrized(Repeated(3, 3)),
}


@pytest.mark.parametrize("net", NETS)
def test_a_module_that_calls_itself(net: str) -> None:
    make: Any = NETS[net]
    classification(nn.Sequential(nn.Linear(3, 3), make(), nn.Linear(3, 3)), (3,)).check()


class Rewritten(Repeated):
    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return self(y, depth - 1).tanh_() if depth else y


def test_a_view_that_such_a_module_returned_is_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Rewritten(3, 3), nn.Linear(3, 3))
    Problem(model, (torch.randn(4, 2, 3),), nn.MSELoss(), torch.randn(4, 2, 3)).check()
