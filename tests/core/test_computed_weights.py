"""Weights that are computed from parameters and constants, as long as the batch by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, classification

D, H, C = 4, 5, 3  # every batch below is as long as one of them, or as none


def _adapted(net: Any, x: Tensor) -> Tensor:
    """A low-rank update that is merged into a frozen weight."""
    h = torch.tanh(F.linear(x, net.first.weight + net.up @ net.down))
    return F.linear(h, net.last.weight + (net.out.weight @ net.inner.weight).T)


def _standardized(net: Any, x: Tensor) -> Tensor:
    """A frozen weight plus an update, every row divided by its norm."""
    weight = net.first.weight + net.up @ net.down
    h = torch.tanh(F.linear(x, weight / weight.norm(dim=1, keepdim=True)))
    return F.linear(h, net.last.weight * (net.out.weight @ net.inner.weight).norm())


def _convolved(net: Any, x: Tensor) -> Tensor:
    """The same, as the kernel of a convolution."""
    kernel = (net.first.weight + net.up @ net.down).reshape(H, 1, D)
    h = F.conv1d(x[:, None], kernel, padding=1).mean(2)
    return F.linear(torch.tanh(h), net.last.weight + (net.out.weight @ net.inner.weight).T)


def _solved(net: Any, x: Tensor) -> Tensor:
    """A kernel matrix of learned points, and a solution."""
    points = net.up @ net.down
    kernel = torch.exp(-(points[:, None] - points).square().sum(2)) + torch.eye(H)
    means = torch.linalg.solve(kernel, net.out.weight @ net.inner.weight + net.shift)
    return torch.exp(-(x[:, None] - points).square().sum(2)) @ means


FORWARD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "adapted": _adapted,
    "standardized": _standardized,
    "convolved": _convolved,
    "solved": _solved,
}


def _net(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    net = Net(
        forward,
        first=nn.Linear(D, H, bias=False).requires_grad_(False),
        last=nn.Linear(H, C, bias=False).requires_grad_(False),
        out=nn.Linear(2, H, bias=False),
        inner=nn.Linear(C, 2, bias=False),
    )
    net.up, net.down = nn.Parameter(torch.randn(H, 2)), nn.Parameter(torch.randn(2, D))
    net.register_buffer("shift", torch.randn(H, C))
    return net


@pytest.mark.parametrize("batch", [2, C, D, H, 7])
@pytest.mark.parametrize("name", FORWARD)
def test_axis_0_of_a_computed_weight_holds_no_samples(name: str, batch: int) -> None:
    problem = classification(_net(FORWARD[name]), (D,), batch, C)
    problem.run(BatchGrad(), DiagGGNExact())
    problem.compare("grad_batch", problem.expected(oracle.individual_gradients))
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])


class Rounded(torch.autograd.Function):
    """To the nearest quarter, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Quantized(nn.Linear):
    """Rounds input and weight, with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = F.linear(Rounded.apply(x), Rounded.apply(self.weight), self.bias)
        return result


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("batch", [2, C, D, H])
def test_a_function_of_weights_is_not_dyed(batch: int) -> None:
    net = nn.Sequential(Quantized(D, H), nn.Tanh(), Quantized(H, C))
    problem = classification(net, (D,), batch, C)
    problem.run(BatchGrad(), DiagGGNExact())
    problem.compare("grad_batch", problem.expected(oracle.individual_gradients))
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])


MASK = (1.3, -0.4, 0.8)

MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda p, mask: p * 2,
    "masked": lambda p, mask: p * mask,
    "noisy": lambda p, mask: p + p.exp() * mask,
    "multiplied": lambda p, mask: p @ torch.diag(mask),
    "rounded": lambda p, mask: Rounded.apply(p * 2),
}

USED: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "bias": (1, lambda x, p, mask: F.linear(x, mask.outer(mask), p)),
    "vector": (1, lambda x, p, mask: torch.mv(x, p)[:, None] * mask),
    "summand": (2, lambda x, p, mask: torch.baddbmm(p, x[:, :, None], x[:, None] * mask)[:, 0]),
    "gain": (1, lambda x, p, mask: F.batch_norm(x, 0 * mask, mask**0, p)),
    "unlisted": (1, lambda x, p, mask: torch.hypot(x, p)),
    "picked": (2, lambda x, p, mask: x + p[[2, 0, 2]]),
    "bag": (2, lambda x, p, mask: x + F.embedding_bag(torch.tensor([[2, 0]] * 3), p)),
    "centres": (2, lambda x, p, mask: torch.cdist(x, p)),
    "solved": (2, lambda x, p, mask: torch.linalg.solve(p, x, left=False)),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("used", USED)
def test_whatever_uses_it(used: str, made: str) -> None:
    """All axes are as long as the batch, also those of constants that weights meet."""
    (axes, use), make = USED[used], MADE[made]

    def forward(net: Any, x: Tensor) -> Tensor:
        mask = torch.tensor(MASK)
        return use(net.first(x), make(net.p, mask), mask)

    net = Net(forward, first=nn.Linear(D, C), p=nn.Parameter(torch.randn([C] * axes)))
    problem = classification(net, (D,), C, C)
    problem.run(BatchGrad(), DiagGGNExact())
    problem.whole = True
    problem.compare("grad_batch", problem.expected(oracle.individual_gradients))
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_rows_of_a_parameter_that_meet_before_each_meets_a_sample() -> None:
    """They are taken for rows of samples, and no call is behind that would tell."""
    net = Net(lambda net, x: x * torch.linalg.inv(2 * net.p), p=nn.Parameter(torch.randn(C, C)))
    model = extend(net)
    with backpack(BatchGrad()), pytest.raises(SampleMixingError, match="Inv"):
        model(torch.randn(C, C)).square().sum().backward()
