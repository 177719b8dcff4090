"""Last layers that receive merged positions, behind views and modules, and frozen bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    SqrtGGNExact,
)
from backpack_data import accumulate
from backpack_secondorder import condensed
from tests import oracle
from tests.cases import Net

D, T = 3, 4


def _body(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.body(x))


def _pixels(net: Any, x: Tensor) -> Tensor:
    maps = net.conv(x.transpose(1, 2).unsqueeze(3))
    return net.head(maps.permute(0, 2, 3, 1).reshape(-1, D))  # type: ignore[no-any-return]


def _there_and_back(net: Any, x: Tensor) -> Tensor:
    rows = net.middle(net.flatten(net.body(x)))
    return net.head(net.unflatten(rows).tanh()).flatten(0, 1)  # type: ignore[no-any-return]


def _recurrent(net: Any, x: Tensor) -> Tensor:
    """With the time in front."""
    steps = net.act(net.recurrent(x.transpose(0, 1))[0])
    return net.head(steps.flatten(0, 1))  # type: ignore[no-any-return]


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "view": lambda net, x: net.head(_body(net, x).reshape(-1, D)),
    "behind": lambda net, x: net.head(_body(net, x)).flatten(0, 1),
    "module": lambda net, x: net.head(net.act(net.flatten(net.body(x)))),
    "module behind": lambda net, x: net.flatten(net.head(net.body(x))),
    "module on data": lambda net, x: net.head(net.act(net.body(net.flatten(x)))),
    "there and back": _there_and_back,
    "pixels": _pixels,
    "layer": lambda net, x: net.head(net.act(net.body(x)).view(-1, D)),
    "attention": lambda net, x: net.head(
        net.attention(x, x, x, need_weights=False)[0].reshape(-1, D)
    ),
    "recurrent": _recurrent,
}
TURNED = {"recurrent"}


def _net(name: str, classes: int, is_frozen: bool) -> nn.Module:
    net = Net(
        FORWARDS[name],
        body=nn.Linear(D, D),
        middle=nn.Linear(D, D),
        conv=nn.Conv2d(D, D, 1),
        act=nn.Tanh(),
        attention=nn.MultiheadAttention(D, 1, batch_first=True),
        recurrent=nn.GRU(D, D),
        flatten=nn.Flatten(0, 1),
        unflatten=nn.Unflatten(0, (-1, T)),
        head=nn.Linear(D, classes),
    )
    net.requires_grad_(not is_frozen)
    net.head.requires_grad_()
    return net


class Case:
    """A net, its data, a loss of all rows, and what should come out.

    Attributes:
        used: The parameters that the loss depends on.
    """

    def __init__(self, name: str, samples: int, classes: int, loss: str, is_frozen: bool) -> None:
        self.net, self.x = _net(name, classes, is_frozen), torch.randn(samples, T, D)
        is_ce = loss == "cross entropy"
        self.lossfunc: nn.Module = nn.CrossEntropyLoss() if is_ce else nn.MSELoss(reduction="sum")
        each = torch.randint(classes, (samples, T)) if is_ce else torch.randn(samples, T, classes)
        self.each, self.share = each, 1 / (samples * T) if is_ce else 1.0
        self.y = (each.transpose(0, 1) if name in TURNED else each).flatten(0, 1)
        trained = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        slopes = torch.autograd.grad(
            self.of_sample(0, self.net(self.x[:1])), [*trained.values()], allow_unused=True
        )
        pairs = zip(trained.items(), slopes, strict=True)
        self.used = {n: p for (n, p), slope in pairs if slope is not None}

    def of_sample(self, n: int, rows: Tensor) -> Tensor:
        """The part of a sample in the loss, of its rows."""
        alone = type(self.lossfunc)(reduction="sum")
        return self.share * alone(rows, self.each[n])  # type: ignore[no-any-return]

    def gradients(self, n: int) -> tuple[Tensor, ...]:
        """Of a sample's part."""
        return torch.autograd.grad(
            self.of_sample(n, self.net(self.x[n : n + 1])), [*self.used.values()]
        )

    def blocks(self, n: int) -> list[Tensor]:
        """``J_nᵀ ∇²ℓ_n J_n`` of each parameter. Shape ``[P, P]``."""
        rows = self.net(self.x[n : n + 1])
        size = rows.numel()
        hessian = torch.autograd.functional.hessian(
            lambda z: self.of_sample(n, z), rows.detach()
        ).reshape(size, size)
        jacobians = [
            torch.autograd.grad(z, [*self.used.values()], retain_graph=True) for z in rows.flatten()
        ]
        each = [torch.stack(j).flatten(1) for j in zip(*jacobians, strict=True)]
        return [j.T @ hessian @ j for j in each]

    def run(self, *extensions: Any, **options: Any) -> None:
        loss = extend(self.lossfunc)(extend(self.net)(self.x), self.y)
        with backpack(*extensions, **options):
            loss.backward()

    def check(self) -> None:
        """Compare with the loop."""
        samples = range(len(self.x))
        gradients = zip(*map(self.gradients, samples), strict=True)
        blocks = zip(*map(self.blocks, samples), strict=True)
        for (name, p), slopes, each in zip(self.used.items(), gradients, blocks, strict=True):
            own = vars(p)
            oracle.assert_close(own["grad_batch"], torch.stack(slopes))
            diagonals = torch.stack([block.diagonal().view_as(p) for block in each])
            oracle.assert_close(own["diag_ggn_exact_batch"], diagonals)
            oracle.assert_close(own["diag_ggn_exact"], diagonals.sum(0))
            if name == "head.bias":
                oracle.assert_close(own["kflr"][0], sum(each[1:], each[0]))


# Number of samples, classes, loss, columns at once.
SETTINGS = [
    (1, 7, "cross entropy", None),
    (2, 7, "cross entropy", 1),
    (3, 7, "squares", None),
    (T, 7, "squares", 3),
    (3, 2, "cross entropy", None),
    (2, 2, "squares", 1),
]


@pytest.mark.grid(8)
@pytest.mark.parametrize(("samples", "classes", "loss", "chunk_size"), SETTINGS)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_merged_positions_at_a_head(
    name: str, is_frozen: bool, samples: int, classes: int, loss: str, chunk_size: int | None
) -> None:
    case = Case(name, samples, classes, loss, is_frozen)
    kinds = (DiagGGNExact, BatchDiagGGNExact)
    case.run(BatchGrad(), *(kind(chunk_size=chunk_size) for kind in kinds),
             KFLR(chunk_size=chunk_size, fail_mode="diagonal"))  # fmt: skip
    case.check()


@pytest.mark.parametrize("name", ["view", "module", "pixels", "behind"])
def test_condensed_columns_are_worth_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also sampled ones, and beside an extension that reads the columns themselves."""
    case, found = Case(name, 3, 7, "cross entropy", False), []
    for worthwhile in (0.0, condensed.WORTHWHILE):
        monkeypatch.setattr(condensed, "WORTHWHILE", worthwhile)
        torch.manual_seed(0)
        case.run(DiagGGNMC(20), DiagGGNExact())
        found.append([(p.diag_ggn_mc, p.diag_ggn_exact) for p in case.used.values()])  # type: ignore[attr-defined]
    for plain, ours in zip(*found, strict=True):
        oracle.assert_close(ours[0], plain[0])
        oracle.assert_close(ours[1], plain[1])
    case.run(SqrtGGNExact(), DiagGGNExact())
    for p, (_, plain_diagonal) in zip(case.used.values(), found[0], strict=True):
        own: Any = p
        oracle.assert_close(own.sqrt_ggn_exact.square().sum((0, 1)), plain_diagonal)
        oracle.assert_close(own.diag_ggn_exact, plain_diagonal)


def test_over_batches() -> None:
    case = Case("view", 4, 7, "cross entropy", False)
    batches = [(case.x[:1], case.y[:T]), (case.x[1:], case.y[T:])]
    found = accumulate(case.net, case.lossfunc, batches, DiagGGNExact(), progress=False)
    blocks = zip(*map(case.blocks, range(4)), strict=True)
    for (name, _), each in zip(case.used.items(), blocks, strict=True):
        total = sum(each[1:], each[0]).diagonal()
        oracle.assert_close(found[name, "diag_ggn_exact"].flatten(), total)
