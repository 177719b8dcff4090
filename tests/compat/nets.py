"""Small nets, and a backward pass with extensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backpack import backpack, extend

N = 4


def data(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, *shape), torch.arange(N) % 2


def run(model: nn.Module, x: Tensor, y: Tensor, *exts: Any) -> list[nn.Parameter]:
    loss = extend(nn.CrossEntropyLoss())(extend(model)(x), y)
    with backpack(*exts):
        loss.backward()
    return list(model.parameters())


def linear_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 2))
