"""Kronecker factors of weights that are used several times, or on rows in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import EKFAC, KFLR
from tests import oracle
from tests.cases import Net, classification
from tests.secondorder.factors import inputs_of


@pytest.mark.parametrize("setting", ["kfc", "expand", "reduce"])
def test_uses_of_a_weight_are_shared_positions(setting: Any) -> None:
    """Eschenhagen et al. (2023): in several calls as on the tokens of one, to the last factor."""
    layer, other, last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    parts = {"a": layer, "b": other, "last": last, "t": nn.Tanh()}

    def in_one_call(net: Net, x: Tensor) -> Tensor:
        return net.last(net.b(net.t(net.a(x))).mean(1))  # type: ignore[no-any-return]

    def in_three_calls(net: Net, x: Tensor) -> Tensor:
        each = [net.b(net.t(net.a(token))) for token in x.unbind(1)]
        return net.last(sum(each[1:], each[0]) / 3)  # type: ignore[no-any-return]

    problem = classification(Net(in_one_call, **parts), (3, 3))
    problem.run(KFLR(setting), EKFAC(None, setting))
    expected = [list(p.kflr) for p in problem.parameters]
    dense = [p.ekfac.dense() for p in problem.parameters]
    problem.model = Net(in_three_calls, **parts)
    problem.run(KFLR(setting), EKFAC(None, setting))
    for p, factors, block in zip(problem.parameters, expected, dense, strict=True):
        for ours, factor in zip(p.kflr, factors, strict=True):
            oracle.assert_close(ours, factor)
        oracle.assert_close(p.ekfac.dense(), block)


@pytest.mark.parametrize("size", [None, 1])
def test_weight_of_two_layers_in_a_row(size: int | None) -> None:
    """Factors by hand from both layers' inputs and columns; the block itself for the bias."""
    net = Net(lambda net, x: net.b(net.t(net.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3),
              t=nn.Tanh())  # fmt: skip
    net.b.weight, net.b.bias = net.a.weight, net.a.bias
    problem = classification(net, (3,))
    weight, bias = problem.parameters
    blocks = problem.expected(oracle.ggn)
    received = inputs_of(problem)
    problem.run(KFLR(chunk_size=size), KFLR("expand", savefield="expanded", chunk_size=size))
    rows = torch.stack([received[net.a], received[net.b]], 1)
    both = torch.einsum("nsi,nsj->ij", rows, rows) / len(rows)
    oracle.assert_close(bias.kflr[0], blocks[1].sum(0))
    oracle.assert_close(weight.kflr[0], blocks[1].sum(0))
    oracle.assert_close(weight.kflr[1], both)
    oracle.assert_close(weight.expanded[1], both / 2)


def _time_first(net: Any, h: Tensor) -> Tensor:
    return net.b(h.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


def _windows_first(net: Any, h: Tensor) -> Tensor:
    windows = h.view(-1, 2, 2, 3).transpose(0, 1).flatten(0, 1)
    return net.b(windows).view(2, -1, 2, 2).transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]


def _frozen(net: Any, h: Tensor) -> Tensor:
    return net.c(net.b(h.detach().clone()))[..., :2]  # type: ignore[no-any-return]


@pytest.mark.parametrize("sharing", ["kfc", "expand", "reduce"])
@pytest.mark.parametrize("order", [_time_first, _windows_first, _frozen])
def test_rows_of_samples_in_other_orders(order: Any, sharing: Any) -> None:
    """Where axis 0 is not the batch, but each row is of one sample, factors are the usual ones."""
    found = []
    for forward in (order, lambda net, h: order(net, h) if order is _frozen else net.b(h)):
        torch.manual_seed(0)
        net = Net(
            lambda net, x, forward=forward: torch.tanh(forward(net, net.a(x))).sum(1),
            a=nn.Linear(3, 3),
            b=nn.Linear(3, 2),
            c=nn.Linear(2, 5),
        )
        net.a.requires_grad_(order is not _frozen)
        problem = classification(net, (4, 3), 3, classes=2)
        received: list[Tensor] = []
        handle = net.b.register_forward_hook(lambda m, x, y: received.append(x[0]))  # noqa: B023
        problem.run(KFLR(sharing))
        handle.remove()
        found.append(net.b.weight.kflr)
    for ours, expected in zip(*found, strict=True):
        oracle.assert_close(ours, expected)
    x = received[-1].detach().reshape(3, 4, 3)
    if sharing == "kfc":
        oracle.assert_close(found[0][1], torch.einsum("nsi,nsj->ij", x, x) / 3)
    elif sharing == "expand":
        oracle.assert_close(found[0][1], torch.einsum("nsi,nsj->ij", x, x) / 12)
    else:
        oracle.assert_close(found[0][1], torch.einsum("ni,nj->ij", x.mean(1), x.mean(1)) / 3)


def test_rows_of_a_table_count_for_all_samples() -> None:
    net = Net(lambda net, x: net.a(x) + net.b(torch.eye(4)), a=nn.Linear(3, 3), b=nn.Linear(4, 3))
    problem = classification(Net(lambda outer, x: outer.net(x).tanh().sum(1), net=net), (4, 3), 4)
    problem.run(KFLR())
    oracle.assert_close(net.b.weight.kflr[1], torch.eye(4))


class Function(nn.Linear):
    """Without a rule: a function uses the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("kind", [nn.Linear, Function])
@pytest.mark.parametrize("setting", ["kfc", "expand", "reduce"])
def test_rows_that_a_mask_picked(setting: Any, kind: type[nn.Linear]) -> None:
    """The inputs of a sample are its own rows, as many as it has."""
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    trunk, head, lossfunc = nn.Linear(2, 5), kind(5, 3), nn.CrossEntropyLoss()
    x, y = torch.randn(4, 3, 2), torch.randint(3, (8,))
    rows, owners = torch.tanh(trunk(x))[mask].detach(), mask.nonzero()[:, 0]
    if setting == "reduce":
        rows = torch.stack([rows[owners == n].mean(0) for n in range(4)])
    for part in (trunk, head, lossfunc):
        extend(part)
    with backpack(KFLR(setting)):
        lossfunc(head(torch.tanh(trunk(x))[mask]), y).backward()
    _, inner = head.weight.kflr  # type: ignore[misc]
    torch.testing.assert_close(inner, rows.T @ rows / (8 if setting == "expand" else 4))


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_rows_that_the_loss_leaves_out(samples: int) -> None:
    """They are a use of the weight by each sample, for any number of samples."""
    net = Net(
        lambda net, x: net.b(torch.cat([net.a(x), net.a(-x)]))[: len(x)],
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    )
    x, lossfunc = torch.randn(samples, 3), extend(nn.MSELoss())
    loss = lossfunc(extend(net)(x), torch.zeros(samples, 2))
    with backpack(KFLR()):
        loss.backward()
    oracle.assert_close(net.a.weight.kflr[1], 2 * x.T @ x / samples)  # type: ignore[union-attr]


class Ways(nn.Module):
    """A last layer in a module, or its weight at an operation, below two losses."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(4, 3), nn.Linear(3, 3, bias=False)
        self.table = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, weight = torch.tanh(self.first(x)), self.last.weight
        if self.way == "table":
            return h + F.embedding(x.argmax(1), self.table.weight)
        if self.way == "linear":
            return F.linear(h, weight)
        if self.way == "steps":
            return F.linear(torch.stack([h, -2 * h], 1).transpose(0, 1), weight).sum(0)
        if self.way == "transposed":
            return h @ weight
        return self.last(h) if self.way == "module" else self.table(x.argmax(1)) + h


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("way", ["module", "linear", "steps", "transposed", "table", "lookup"])
def test_a_use_below_two_losses_counts_once(way: str, chunk_size: int | None) -> None:
    """The input factor is that of the use, however many losses there are."""
    model, x = extend(Ways(way)), torch.randn(4, 4)
    lossfuncs = [extend(nn.MSELoss()), extend(nn.MSELoss(reduction="sum"))]
    outputs = model(x)
    loss = sum(lossfunc(outputs, torch.zeros_like(outputs)) for lossfunc in lossfuncs)
    with backpack(KFLR(chunk_size=chunk_size)):
        loss.backward()  # type: ignore[union-attr]
    h = torch.tanh(model.first(x)).detach()
    inner = h.T @ h / 4
    if way in ("table", "lookup"):
        inner = F.one_hot(x.argmax(1), 4).sum(0) / 4
    elif way == "steps":
        inner = 5 * inner
    found: Any = model.table.weight if way in ("table", "lookup") else model.last.weight
    oracle.assert_close(found.kflr[1], inner.to(h.dtype))
    scale = 2 + 2 / 12
    outer = scale * 4 * torch.eye(3)
    oracle.assert_close(found.kflr[0], 4 * outer if way == "steps" else outer)


@pytest.mark.parametrize("setting", ["kfc", "expand", "reduce"])
@pytest.mark.parametrize("is_einsum", [True, False])
def test_a_vector_that_rows_are_multiplied_with_has_its_block(
    is_einsum: bool, setting: Any
) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.a(x).tanh()
        weights = torch.einsum("ntd,d->nt", hidden, net.v) if is_einsum else hidden @ net.v
        result: Tensor = net.b((weights.softmax(1).unsqueeze(1) @ hidden)[:, 0])
        return result

    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 3), "v": nn.Parameter(torch.randn(4))}
    problem = classification(Net(forward, **parts), (3, 3))
    place = [name for name, _ in problem.model.named_parameters()].index("v")
    expected = problem.expected(oracle.ggn)[place].sum(0)
    problem.run(KFLR(setting), EKFAC(None, setting))
    vector = problem.model.v
    oracle.assert_close(vector.kflr.dense(), expected)
    oracle.assert_close(vector.ekfac.dense(), expected)
