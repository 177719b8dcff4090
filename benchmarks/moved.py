"""Small nets whose rows are not samples in order, or whose weights are computed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.problems import Problem


class Windows(nn.Module):
    """Attention within shifted windows of an image, as in a Swin transformer: ``[N, 1, 8, 8]``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(1, width, 1), nn.Linear(width, 10)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[N, 10]``."""
        h = self.embed(x).permute(0, 2, 3, 1).roll((-2, -2), (1, 2))
        n, rows, columns, width = h.shape
        windows = h.view(n, rows // 4, 4, columns // 4, 4, width).permute(1, 3, 0, 2, 4, 5)
        q, k, v = self.qkv(windows.reshape(-1, 16, width)).chunk(3, -1)
        mixed = self.project((q @ k.transpose(1, 2) / width**0.5).softmax(-1) @ v)
        parts = mixed.view(windows.shape).permute(2, 0, 3, 1, 4, 5).reshape(n, -1, width)
        result: Tensor = self.head((h.reshape(n, -1, width) + parts).mean(1))
        return result


class Experts(nn.Module):
    """A mixture of experts over eight tokens, each of which goes to two: ``[N, 8, 16]``."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(width, experts), nn.Linear(width, 10)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[N, 10]``."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        found = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            found.index_add_(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        result: Tensor = self.head(found.view_as(x).mean(1))
        return result


def normalised(width: int) -> nn.Module:
    """Three linear layers with weight normalisation."""
    layers = [nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 10)]
    first, *others = (weight_norm(layer) for layer in layers)
    return nn.Sequential(first, *(m for layer in others for m in (nn.Tanh(), layer)))


MOVED = {
    problem.name: problem
    for problem in (
        Problem("windows", Windows, (1, 8, 8), 10, 16, 16),
        Problem("experts", Experts, (8, 16), 10, 16, 16),
        Problem("normalised", partial(normalised, 64), (64,), 10, 32, 32),
    )
}
