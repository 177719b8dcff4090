"""Nets for first-order quantities: every kind of contraction, every way to share a parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import oracle
from tests.cases import Net, Problem, classification


def _mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)), (4,)


def _tokens() -> tuple[nn.Module, tuple[int, ...]]:
    """A linear layer whose weight seven positions share, and normalisations."""
    layers = [nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Flatten(), nn.Linear(42, 3)]
    return nn.Sequential(*layers), (7, 4)


def _convolutions() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(4, 6, 2, groups=2, stride=2), nn.Flatten(), nn.Linear(24, 3),
    ]  # fmt: skip
    return nn.Sequential(*layers), (2, 4, 4)


def _wide_convolution() -> tuple[nn.Module, tuple[int, ...]]:
    """Few positions and many features: norms come from Gram matrices."""
    layers = [nn.Conv2d(6, 9, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers), (6, 3, 3)


def _transposed() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [nn.ConvTranspose1d(4, 6, 2, groups=2, stride=2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(36, 3)), (4, 3)


def _tied() -> tuple[nn.Module, tuple[int, ...]]:
    parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    net = Net(lambda net, x: net.b(torch.tanh(net.a(x))), **parts)
    net.b.weight = net.a.weight
    return net, (3,)


def _called_twice() -> tuple[nn.Module, tuple[int, ...]]:
    parts = {"conv": nn.Conv1d(2, 2, 3, padding=1), "last": nn.Linear(8, 3)}
    return Net(lambda net, x: net.last(net.conv(net.conv(x).tanh()).flatten(1)), **parts), (2, 4)


def _bridged() -> tuple[nn.Module, tuple[int, ...]]:
    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = F.silu(net.conv(x)).transpose(2, 3) + x[:, :1]
        return net.last(hidden.flatten(1) * 2)

    return Net(forward, conv=nn.Conv2d(2, 3, 3, padding=1), last=nn.Linear(48, 3)), (2, 4, 4)


def _attention() -> tuple[nn.Module, tuple[int, ...]]:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.last(net.attention(x, x, x, need_weights=False)[0].flatten(1))

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return Net(forward, attention=attention, last=nn.Linear(12, 3)), (3, 4)


def _frozen() -> tuple[nn.Module, tuple[int, ...]]:
    net, shape = _mlp()
    net[0].weight.requires_grad_(False)  # type: ignore[index]
    return net, shape


NETS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "mlp": _mlp,
    "tokens": _tokens,
    "convolutions": _convolutions,
    "wide_convolution": _wide_convolution,
    "transposed": _transposed,
    "tied": _tied,
    "called_twice": _called_twice,
    "bridged": _bridged,
    "attention": _attention,
    "frozen": _frozen,
}


def make(net: str, batch: int = 5, reduction: str = "mean") -> Problem:
    """A net by name, with random data and the cross-entropy loss."""
    model, shape = NETS[net]()
    return classification(model, shape, batch, reduction=reduction)


def gradients(problem: Problem) -> list[Tensor]:
    """Individual gradients by autograd, ``[N, *θ]`` for each trained parameter."""
    return problem.expected(oracle.individual_gradients)
