"""A loss that is a function takes the batch apart: labelled and other samples, or one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import AutodiffFallbackWarning, SampleMixingError
from backpack_core.extensions import KFLR, BatchDiagGGNExact, BatchGrad, DiagHessian
from tests import oracle
from tests.cases import Net

N = 4
TARGET = torch.tensor([0, 2, 1, 0])
Loss = Callable[[Tensor], Tensor]

APART: dict[str, Loss] = {
    "slice": lambda out: (out[1:] - 1).pow(2).sum(),
    "from the end": lambda out: out[-2:].exp().sum() + out[-1].sin().sum(),
    "every other one": lambda out: out[::2].exp().sum(),
    "slice of a slice": lambda out: out[1:][1:].exp().sum() + out[:3][[0, 2]].sin().sum(),
    "with classes": lambda out: F.cross_entropy(out[:3], TARGET[:3]),
    "labelled and others": lambda out: F.cross_entropy(out[:3], TARGET[:3]) + out[3:].exp().mean(),
    "parts": lambda out: torch.stack([F.cross_entropy(part, TARGET[:2])
                                      for part in out.split(2)]).sum(),
    "unequal parts": lambda out: torch.stack([p.exp().sum() for p in out.split([1, 3])]).sum(),
    "one by one": lambda out: torch.stack([F.cross_entropy(out[n], TARGET[n])
                                           for n in range(N)]).mean(),
    "unbound": lambda out: torch.stack([F.cross_entropy(row, TARGET[1]) for row in out]).mean(),
    "rows": lambda out: torch.stack([F.cross_entropy(out[n : n + 1], TARGET[n : n + 1])
                                     for n in range(N)]).mean(),
}  # fmt: skip
MIXED: dict[str, Loss] = {
    "neighbours": lambda out: (out[1:] - out[:-1]).pow(2).sum(),
    "halves": lambda out: (out[:2] * out[2:]).exp().sum(),
    "one and all": lambda out: (out[:1] - out).pow(2).sum(),
    "variance": lambda out: out[:3].var(0).sum(),
    "one and another": lambda out: (out[0] * out[1]).exp().sum(),
}


def model(classes: int) -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    return net, torch.randn(N, 3).double()


@pytest.mark.parametrize("classes", [3, N])
@pytest.mark.parametrize("name", APART)
def test_parts(name: str, classes: int) -> None:
    net, x = model(classes)
    single = []
    for n in range(N):  # the others are constants
        rows = [net(x[k : k + 1]) for k in range(N)]
        out = torch.cat([row if k == n else row.detach() for k, row in enumerate(rows)])
        single.append(torch.autograd.grad(APART[name](out), list(net.parameters())))
    extend(net)
    for _ in range(2):
        with backpack(BatchGrad()):
            APART[name](net(x)).backward()
        for k, p in enumerate(net.parameters()):
            expected = torch.stack([gradient[k] for gradient in single])
            torch.testing.assert_close(p.grad_batch, expected)  # type: ignore[attr-defined]


def test_parts_of_an_empty_batch() -> None:
    net, x = model(3)
    out = extend(net)(x[:0])
    with backpack(BatchGrad()):
        (out[1:].exp().sum() + sum(part.square().sum() for part in out.split(2))).backward()
    for p in net.parameters():
        assert p.grad_batch.shape == (0, *p.shape)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MIXED)
def test_parts_that_meet(name: str) -> None:
    net, x = model(3)
    extend(net)
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        MIXED[name](net(x)).backward()


LOOPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda row, y: (row - y).square().sum(),
    "loss": F.mse_loss,
    "dot": torch.dot,
    "norm": lambda row, y: (row - y).norm(),
}


class Scaled(nn.Module):
    """A parameter of its own behind a module, in a net that works entry by entry."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        self.inner = nn.PReLU()
        self.gain = nn.Parameter(torch.randn(()))
        self.is_turned = is_turned

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        return (hidden.T if self.is_turned else hidden) * self.gain


@pytest.mark.parametrize("name", LOOPS)
def test_one_by_one_with_as_many_entries_as_samples(name: str) -> None:
    """A row of the output is a sample, whatever its length."""
    x, y = torch.randn(N, N), torch.randn(N, N)
    net = Scaled(is_turned=False)
    single = [
        torch.autograd.grad(LOOPS[name](net(x)[n], y[n]), list(net.parameters())) for n in range(N)
    ]
    extend(net)
    with backpack(BatchGrad()):
        torch.stack([LOOPS[name](row, y[n]) for n, row in enumerate(net(x))]).sum().backward()
    for k, p in enumerate(net.parameters()):
        expected = torch.stack([gradient[k] for gradient in single])
        torch.testing.assert_close(p.grad_batch, expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LOOPS)
def test_one_by_one_where_entries_are_other_samples(name: str) -> None:
    """An entry of a row is a sample's, and gets what comes to it."""
    x, y, net = torch.randn(N, N), torch.randn(N, N), Scaled(is_turned=True)

    def total(out: Tensor) -> Tensor:
        return torch.stack([LOOPS[name](row, y[n]) for n, row in enumerate(out)]).sum()

    single, out = [], net(x)
    for n in range(N):  # the others are constants
        own = torch.where(torch.arange(N) == n, out, out.detach())
        single.append(torch.autograd.grad(total(own), [*net.parameters()], retain_graph=True))
    with backpack(BatchGrad()):
        total(extend(net)(x)).backward()
    for parameter, gradients in zip(net.parameters(), zip(*single, strict=True), strict=True):
        torch.testing.assert_close(vars(parameter)["grad_batch"], torch.stack(gradients))


def test_mixing_behind_a_gradient_that_cancels() -> None:
    """All samples together get none, though each sends some to the others."""
    out = extend(nn.Linear(3, 3))(torch.randn(N, 3)).softmax(0)
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        out.sum().backward()


def test_a_term_of_weights_in_every_sample() -> None:
    """What lies behind a term may be a parameter, which leads nowhere."""
    net = Net(
        lambda net, x: (x @ net.w).square().sum(1) - torch.linalg.slogdet(net.w)[1],
        w=nn.Parameter(torch.randn(3, 3).double()),
    )
    x = torch.randn(N, 3).double()
    expected = [torch.autograd.grad(net(x[n : n + 1]).mean() / N, net.w)[0] for n in range(N)]
    extend(net)
    with pytest.warns(AutodiffFallbackWarning), backpack(BatchGrad()):
        net(x).mean().backward()
    torch.testing.assert_close(net.w.grad_batch, torch.stack(expected))


def test_steps_first_and_as_many_as_samples() -> None:
    """The last step of all samples is no sample."""
    net = nn.GRU(3, 2).double()
    x = torch.randn(N, N, 3).double()  # steps first
    expected = []
    for n in range(N):
        loss = net(x[:, n : n + 1])[0][-1].exp().sum()
        expected.append(torch.autograd.grad(loss, list(net.parameters())))
    extend(net, batch_axis=1)
    with backpack(BatchGrad()):
        net(x)[0][-1].exp().sum().backward()
    for k, p in enumerate(net.parameters()):
        reference = torch.stack([gradient[k] for gradient in expected])
        torch.testing.assert_close(p.grad_batch, reference)  # type: ignore[attr-defined]


def test_a_part_that_is_known_on_one_way_and_kept_apart_on_another() -> None:
    """Whose a row is, one layer knows; behind what another one's output becomes, nobody does."""

    def state(net: Any, rows: Tensor) -> Tensor:
        state: Tensor = net.a(rows) * net.b(rows).repeat(1, 1).sum(0, keepdim=True)
        return state

    def forward(net: Any, first: Tensor, second: Tensor) -> Tensor:
        states = [state(net, net.table(tokens)[:1]) for tokens in (first, second)]
        return net.head(states[0] * states[1])

    parts = {"table": nn.Embedding(7, 3), **{name: nn.Linear(3, 3) for name in ("a", "b", "head")}}
    net = extend(Net(forward, **parts))
    loss = F.nll_loss(net(torch.arange(4), torch.arange(1, 4)), torch.tensor([1]))
    with backpack(BatchGrad()):
        loss.backward()
    for parameter in net.parameters():
        oracle.assert_close(parameter.grad_batch[0], parameter.grad)
        assert not parameter.grad_batch[1:].any()


EXTENDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "slices": lambda f, out: f(out[:2], TARGET[:2]) + f(out[2:], TARGET[2:]),
    "unequal slices": lambda f, out: f(out[:1], TARGET[:1]) + f(out[1:], TARGET[1:]),
    "every other one": lambda f, out: f(out[::2], TARGET[::2]) + f(out[1::2], TARGET[1::2]),
    "parts": lambda f, out: sum(map(f, out.split([1, 2, 1]), TARGET.split([1, 2, 1])),
                                torch.zeros(())),
    "rows": lambda f, out: sum((f(out[n : n + 1], TARGET[n : n + 1]) for n in range(N)),
                               torch.zeros(())),
    "slice and index": lambda f, out: f(out.narrow(0, 1, 2), TARGET[1:3])
                                      + f(out[[0, 3]], TARGET[[0, 3]]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTENDED)
def test_extended_losses_of_parts_of_one_output(name: str) -> None:
    net, x = model(3)
    lossfunc: Any = nn.CrossEntropyLoss(reduction="sum")
    extend(net), extend(lossfunc)
    extensions = BatchGrad(), BatchDiagGGNExact(), DiagHessian(), KFLR()
    expected: list[list[Tensor]] = []
    for loss in (lambda out: lossfunc(out, TARGET), lambda out: EXTENDED[name](lossfunc, out)):
        with backpack(*extensions):
            loss(net(x)).backward()
        values = [[getattr(p, e.savefield) for e in extensions] for p in net.parameters()]
        found = [[gradient, batch, *rest, *factors] for gradient, batch, *rest, factors in values]
        for ours, whole in zip(found, expected or found, strict=True):
            for value, reference in zip(ours, whole, strict=True):
                torch.testing.assert_close(value, reference)  # type: ignore[arg-type]
        expected = expected or found
