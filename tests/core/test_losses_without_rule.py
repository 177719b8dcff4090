"""Losses that are modules without a rule: they say as much about samples as a function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_checks.dye import DyePropagator
from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad, ClippedSumGrad
from tests import oracle
from tests.cases import Net

N, D, C = 5, 3, 4
LABELS = torch.tensor([0, 1, 0, 2, 1])
Loss = Callable[..., Tensor]


class Own(nn.Module):
    """A loss of the user's."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *given: Tensor) -> Tensor:
        return self.loss(*given)


def _prototypes(z: Tensor) -> Tensor:
    centres = torch.stack([z[label == LABELS].mean(0) for label in range(3)])
    return (z - centres[LABELS]).square().sum()


def _kernels(z: Tensor) -> Tensor:
    others = torch.linspace(-1, 1, 3 * C).view(3, C)
    both = torch.cat([z, others])
    return (-(z[:, None] - both).square().sum(-1)).exp().sum()


def _hardest(z: Tensor) -> Tensor:
    far, same = (z[:, None] - z).square().sum(-1), LABELS[:, None] == LABELS
    closest = far.masked_fill(same, 1e3).amin(1)
    return (far.masked_fill(~same, 0).amax(1) - closest + 5).relu().mean()


MIXING: dict[str, Loss] = {
    "cross-correlation": lambda z: (z.T @ z / N - torch.eye(C)).square().sum(),
    "spread of the batch": lambda z: (2 - (z.var(0) + 1e-4).sqrt()).relu().mean(),
    "entropy of the batch": lambda z: (lambda p: (p * p.log()).sum())(z.softmax(1).mean(0)),
    "determinant": lambda z: torch.logdet(z.T @ z + torch.eye(C)),
    "prototypes": _prototypes,
    "overlap": lambda z: 1 - 0.6 * z.sigmoid().sum() / (1 + z.sigmoid().sum()),
    "ratio": lambda z: z.square().sum() / (1 + z.exp().sum()),
    "contrastive": lambda z: F.cross_entropy(z @ z.T, torch.arange(N).roll(1)),
    "correlation": lambda z: torch.corrcoef(z.T)[0, 1],
    "covariance": lambda z: (torch.cov(z.T) - torch.eye(C)).square().sum(),
    "kernels": _kernels,
    "hardest": _hardest,
    "mean": lambda z: z.mean(0).square().sum(),
    "norms": lambda z: z.norm(dim=0).sum(),
    "product": lambda z: z[0].sum() * z[1].exp().sum(),
    "neighbours": lambda z: (z[1:] - z[:-1]).square().sum(),
}
WAYS: dict[str, Callable[[Loss, Any, Tensor], Tensor]] = {
    "function": lambda loss, net, x: loss(extend(net)(x)),
    "module": lambda loss, net, x: extend(Own(loss))(extend(net)(x)),
    "multiple": lambda loss, net, x: 2 * extend(Own(loss))(extend(net)(x)),
    "root": lambda loss, net, x: (20 + extend(Own(loss))(extend(net)(x))).sqrt(),
    "part of the model": lambda loss, net, x: extend(nn.Sequential(net, Own(loss)))(x),
}


def _net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, C)


@pytest.mark.parametrize("extension", [BatchGrad(), ClippedSumGrad(0.1, normaliser=None)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_meet_in_the_loss(name: str, way: str, extension: Any) -> None:
    value = WAYS[way](MIXING[name], _net(), torch.randn(N, D))
    with pytest.raises(SampleMixingError), backpack(extension):
        value.backward()


def test_losses_that_meet() -> None:
    """Each is a sum over samples; what is made of both is none."""
    net, x = extend(_net()), torch.randn(N, D)
    first, second = extend(Own(lambda z: z.exp().sum())), extend(Own(lambda z: z.square().sum()))
    for meet in (torch.mul, torch.div, torch.hypot):
        z = net(x)
        with pytest.raises(SampleMixingError), backpack(BatchGrad()):
            meet(first(z), second(z)).backward()


SUMS: dict[str, Loss] = {
    "mean": lambda z: z.square().mean(),
    "classes": lambda z: F.cross_entropy(z, torch.arange(len(z)) % C, reduction="sum"),
    "norms": lambda z: z.norm(dim=-1).sum(),
    "ratios": lambda z: (z.exp().sum(-1) / (1 + z.square().sum(-1))).sum(),
    "not reduced": lambda z: z.square(),
    "a number for each": lambda z: F.cross_entropy(z, torch.arange(len(z)) % C, reduction="none"),
}
RECEIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda h: h[:, 0],
    "positions": lambda h: h.flatten(0, 1),
    "time first": lambda h: h.transpose(0, 1).flatten(0, 1),
    "picked": lambda h: h[torch.arange(2 * N).view(N, 2) % 3 > 0],
    "as many as samples": lambda h: h[torch.arange(2 * N).view(N, 2) % 2 > 0],
    "every second": lambda h: h[::2].flatten(0, 1),
    "repeated": lambda h: h.repeat_interleave(2, 0).flatten(0, 1),
    "two of them": lambda h: h[torch.tensor([0, 0, 3, 3])].flatten(0, 1),
}


def _single(net: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradients in the bias: of all, where all but one sample are constants."""
    found = []
    for n in range(len(x)):
        rows = [net(x[k : k + 1]) for k in range(len(x))]
        h = torch.cat([row if k == n else row.detach() for k, row in enumerate(rows)])
        value = loss(h)
        found += torch.autograd.grad(value, net.bias) if value.requires_grad else [net.bias * 0]
    return torch.stack(found)


@pytest.mark.parametrize("received", RECEIVED)
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_samples(name: str, received: str) -> None:
    """A loss may receive any rows, and targets as long: these are no samples."""
    net, x = _net(), torch.randn(N, 2, D)
    lossfunc = extend(Own(lambda z, targets: SUMS[name](z - targets)))
    pick, targets = RECEIVED[received], torch.rand(4 * N, C)

    def loss(h: Tensor) -> Tensor:
        z = pick(h)
        return lossfunc(z, targets[: len(z)]).sum()  # type: ignore[no-any-return]

    expected = _single(net, x, loss)
    value = loss(extend(net)(x))
    with backpack(BatchGrad()):
        value.backward()
    oracle.assert_close(net.bias.grad_batch, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [6, 5, 4, 3, 2])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_loss_with_time_in_front(reduction: str, steps: int) -> None:
    """It receives lengths and targets, too, which have the samples in front."""
    net, x = _net(), torch.randn(steps, 4, D)
    targets, count = torch.randint(1, C, (4, 1)), torch.tensor([steps] * 4)
    lossfunc = nn.CTCLoss(reduction=reduction)

    def loss(h: Tensor) -> Tensor:
        return lossfunc(h.log_softmax(2), targets, count, count // steps).sum()  # type: ignore[no-any-return]

    expected = _single(net, x.transpose(0, 1), lambda h: loss(h.transpose(0, 1)))
    extend(lossfunc)
    value = loss(extend(net, batch_axis=1)(x))
    with backpack(BatchGrad()):
        value.backward()
    oracle.assert_close(net.bias.grad_batch, expected)  # type: ignore[arg-type]


def test_a_number_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever compared at the output of such a loss: its net is trusted like any other."""
    found, original = [], DyePropagator.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        found.append(1)
        original(self, *args, **options)

    monkeypatch.setattr(DyePropagator, "__init__", init)
    net, lossfunc = extend(_net()), extend(Own(SUMS["mean"]))
    for _ in range(4):
        with backpack(BatchGrad()):
            lossfunc(net(torch.randn(N, D))).backward()
    assert len(found) == 3


@pytest.mark.parametrize("is_known", [True, False])
def test_a_number_inside_of_a_model(is_known: bool) -> None:
    """A temperature is a number that no sample made."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.a(x) * net.temperature(net.one).exp()  # type: ignore[no-any-return]

    temperature = nn.Sequential(nn.Linear(1, 1), Own(torch.sum))
    model = Net(forward, a=_net(), temperature=temperature)
    model.one = torch.ones(1)  # type: ignore[assignment]
    x, loss = torch.randn(N, D), (nn.MSELoss() if is_known else Own(F.mse_loss))
    own = [
        torch.autograd.grad(model(y[None]).square().sum() / (N * C), [*model.parameters()])
        for y in x
    ]
    value = extend(loss)(extend(model)(x), torch.zeros(N, C))
    with backpack(BatchGrad(), check="always"):
        value.backward()
    for parameter, *gradients in zip(model.parameters(), *own, strict=True):
        oracle.assert_close(parameter.grad_batch, torch.stack(gradients))  # type: ignore[attr-defined]
