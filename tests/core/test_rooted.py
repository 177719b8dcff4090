"""What goes inside a call is what was rooted there, in the pass and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact
from backpack_products import Columns
from backpack_secondorder.propagators import LossSqrt
from tests.cases import Net

_rooted: list[Columns] = []
_crossed: list[bool] = []


@dataclass(frozen=True)
class Noting(LossSqrt):
    def rooted(self, quantity: Columns) -> Columns:
        _rooted.append(quantity.like(quantity.blocks))
        return _rooted[-1]

    def cross(self, node: Any, quantities: dict[int, Columns], there: Any) -> Any:
        if node.name().startswith("Mul"):
            _crossed.append(quantities[0] is _rooted[-1])
        return super().cross(node, quantities, there)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_it_goes_inside(chunk_size: int | None) -> None:
    _rooted.clear()
    _crossed.clear()
    inner = Net(lambda net, x: net.gain * net.a(net.a(x)), a=nn.Linear(3, 3))
    inner.gain = nn.Parameter(torch.randn(3))
    outer = extend(nn.Sequential(inner, nn.Linear(3, 3)))
    extension = DiagGGNExact(chunk_size=chunk_size)
    extension.propagator = Noting()
    loss = extend(nn.CrossEntropyLoss())(outer(torch.randn(4, 3)), torch.arange(4) % 3)
    with backpack(extension, check="never"):
        loss.backward()
    assert _crossed == [True] * (2 if chunk_size else 1)
