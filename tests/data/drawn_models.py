"""Models and losses of sums over data sets that are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn


class Named(nn.Module):
    """Takes what a batch holds: one tensor, several, or keywords; returns what is asked for."""

    def __init__(self, body: nn.Module, is_wrapped: bool) -> None:
        super().__init__()
        self.body, self.is_wrapped = body, is_wrapped

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        out = self.body(x if shift is None else x + shift)
        return Output(out) if self.is_wrapped else out


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Tied(nn.Module):
    """One weight in two layers, and in a function."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x).tanh())
        return result


class Multiplied(nn.Module):
    """A parameter that an operation uses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).sigmoid()


class Experts(nn.Module):
    """Each sample goes to one of two layers, and a batch may leave one out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        out, number = torch.zeros_like(x), (x.sum(1) > 0).long()
        for k, expert in enumerate((self.a, self.b)):
            which = torch.where(number == k)[0]
            if len(which):
                out = out.index_add(0, which, expert(x[which]))
        return out.tanh()


class TwoLosses(nn.Module):
    """A loss of two losses."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        total: Tensor = self.first(output, target) + 0.5 * self.second(output, target)
        return total


PARTS: dict[str, Callable[[int], nn.Module]] = {
    "dense": lambda d: nn.Sequential(nn.Linear(d, d), nn.Tanh()),
    "no bias": lambda d: nn.Sequential(nn.Linear(d, d, bias=False), nn.Sigmoid()),
    "tied": Tied,
    "experts": Experts,
    "function": Multiplied,
    "norm": nn.LayerNorm,
    "batch norm": lambda d: nn.BatchNorm1d(d).eval(),
    "dropout": lambda d: nn.Sequential(nn.Linear(d, d), nn.Dropout(0.5).eval()),
    "convolution": lambda d: nn.Sequential(
        nn.Unflatten(1, (1, d)), nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(2 * d, d),
    ),
}  # fmt: skip
WITHOUT_FACTORS: Final = {"tied", "experts", "function", "norm", "batch norm", "convolution"}
