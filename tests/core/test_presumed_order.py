"""Rows that a model computes without a graph, before its first trained layer, show no order.

If operations behind that layer change their order, rows cannot be in order both there and at the
loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, ShapeError
from backpack_core.extensions import BatchGrad
from tests import oracle

D, C = 3, 2


class Tuned(nn.Module):
    """A frozen table, and trained layers; ``run`` is what it does with rows of the table."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], words: int = 7) -> None:
        super().__init__()
        self.table = nn.Embedding(words, D).requires_grad_(False)
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, C)
        self.down, self.up = nn.Parameter(torch.randn(D, 1)), nn.Parameter(torch.randn(1, D))
        self.prompt = nn.Parameter(torch.randn(2, D))
        self.run, self.is_recorded = run, False

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        return self.run(self, x.requires_grad_() if self.is_recorded else x)


def _check(net: nn.Module, words: Tensor, owners: Tensor, is_extended: bool = True) -> None:
    """Compare with gradients of the loss at the rows of each sample."""
    out: Tensor = net(words)
    y = torch.randint(C, out.shape[:-1])
    losses = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    rows = owners.view(*owners.shape, *[1] * (y.dim() - owners.dim())).expand(y.shape)
    parameters = [p for p in net.parameters() if p.requires_grad]
    lossfunc: Any = nn.CrossEntropyLoss(reduction="sum")
    expected = [
        torch.autograd.grad(
            losses[rows == n].sum(), parameters, retain_graph=True, allow_unused=True
        )
        for n in range(int(owners.max()) + 1)
    ]
    extend(net)
    with backpack(BatchGrad()):
        out = net(words)
        if is_extended:
            extend(lossfunc)(out.flatten(0, -2), y.flatten()).backward()
        else:
            out.log_softmax(-1).gather(-1, y[..., None]).sum().neg().backward()
    for parameter, *gradients in zip(parameters, *expected, strict=True):
        if gradients[0] is not None:
            oracle.assert_close(vars(parameter)["grad_batch"], torch.stack(gradients))


Case = tuple[Callable[[Any, Tensor], Tensor], Callable[[int, int], Tensor]]


def _in_order(count: int) -> Callable[[int, int], Tensor]:
    return lambda samples, length: torch.arange(samples).repeat_interleave(count)


def _copies(net: Any, x: Tensor) -> Tensor:
    h = net.a(x.mean(1))
    out: Tensor = net.c(torch.cat([h, 1.1 * h, h.sin()]))
    return out


REORDERED: dict[str, Case] = {
    "copies": (_copies, lambda n, _: torch.arange(n).repeat(3)),
    "draws": (
        lambda net, x: net.c(net.a(x.mean(1)).expand(2, -1, -1).reshape(-1, D)),
        lambda n, _: torch.arange(n).repeat(2),
    ),
    "turned": (
        lambda net, x: net.c(net.a(x.repeat_interleave(2, 0)).flip(0)),
        lambda n, _: torch.arange(n).repeat_interleave(2).flip(0),
    ),
    "stacked": (
        lambda net, x: net.c(torch.stack([h := net.a(x.mean(1)), 1.1 * h, h.sin(), h.cos()])),
        lambda n, _: torch.arange(n).expand(4, n),
    ),
    "even rows first": (
        lambda net, x: net.c(
            torch.cat([(h := net.a(x.flatten(0, 1)).tanh())[::3], h[1::3], h[2::3]])
        ),
        lambda n, length: torch.arange(3 * n).view(n, 3).T.flatten() // 3,
    ),
}


@pytest.mark.parametrize("is_extended", [True, False])
@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("name", REORDERED)
def test_other_order_behind_a_frozen_trunk(name: str, samples: int, is_extended: bool) -> None:
    """It is refused unless ids tell the order; if the data are recorded, it is exact."""
    run, owners = REORDERED[name]
    words = torch.randint(7, (samples, 3))
    for is_recorded in (False, True):
        net = Tuned(run).double()
        net.is_recorded = is_recorded
        with contextlib.suppress(*[] if is_recorded else [SampleMixingError]):
            _check(net, words, owners(samples, 3), is_extended)


def _unpadded(net: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[0, 1:] = False
    found = torch.zeros_like(x)
    found[mask] = net.b(net.a(x[mask]).tanh())
    out: Tensor = net.c(found)
    return out


def _prompted(net: Any, x: Tensor) -> Tensor:
    h = torch.cat([net.prompt.expand(len(x), -1, -1), x], 1)
    h = h + (net.a(h) @ (h @ net.b.weight).mT).softmax(-1) @ h
    out: Tensor = net.c(h[:, 2:])
    return out


def _views(net: Any, x: Tensor) -> Tensor:
    first, second = net.a(torch.cat([x, x.flip(1)])).chunk(2)
    out: Tensor = net.c(first * second)
    return out


def _in_windows(net: Any, x: Tensor) -> Tensor:
    h = net.a(x.unflatten(1, (-1, 2)).flatten(0, 1)).tanh()
    out: Tensor = net.c(h + h.mean(1, keepdim=True)).view(*x.shape[:2], C)
    return out


def _time_first(net: Any, x: Tensor) -> Tensor:
    steps, samples = x.shape[1], len(x)
    h = net.a((2 * x).transpose(0, 1).reshape(-1, D)).view(steps, samples, D)
    out: Tensor = net.c(h.transpose(0, 1).flatten(0, 1))
    return out


def _by_beam(net: Any, x: Tensor) -> Tensor:
    out: Tensor = net.c(net.a(x.repeat(3, 1, 1)).tanh()).view(3, *x.shape[:2], C).mean(0)
    return out


IN_ORDER: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "unpadded": (_unpadded, 1),
    "prompted": (_prompted, 1),
    "two views": (_views, 1),
    "windows": (_in_windows, 1),
    "time first": (_time_first, 4),
    "beams": (_by_beam, 1),
    "low rank": (
        lambda net, x: net.c(F.linear(h := x.flatten(0, 1), net.a.weight) + h @ net.down @ net.up),
        4,
    ),
    "scaled": (lambda net, x: net.c(x.mean(1) * net.prompt[0]), 1),
}


@pytest.mark.parametrize("is_extended", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", IN_ORDER)
def test_order_of_the_data_at_the_loss(name: str, samples: int, is_extended: bool) -> None:
    """Whatever a model does in between, rows in order at the loss are the samples'."""
    run, count = IN_ORDER[name]
    words = torch.randint(7, (samples, 4))
    _check(Tuned(run).double(), words, _in_order(count)(samples, 4), is_extended)


@pytest.mark.parametrize("is_extended", [True, False])
def test_rows_that_a_mask_picks_behind_a_frozen_trunk(is_extended: bool) -> None:
    """The error says how to record them; then results are exact."""
    mask = torch.tensor([[True, True, False], [True, False, False], [False, True, True]])
    owners = torch.arange(3)[:, None].expand(3, 3)[mask]
    net = Tuned(lambda net, x: net.c(net.a(x[mask]).tanh())).double()
    with pytest.raises(ShapeError, match=r"call requires_grad_|Call requires_grad_"):
        _check(net, torch.randint(7, (3, 3)), owners, is_extended)
    net.is_recorded = True
    _check(net, torch.randint(7, (3, 3)), owners, is_extended)


def _deduplicated(net: Any, x: Tensor) -> Tensor:
    rows, index = torch.unique(x.flatten(0, 1), dim=0, return_inverse=True)
    out: Tensor = net.c(net.a(rows)[index])
    return out


def test_different_rows_as_many_as_samples() -> None:
    """Later passes may have as many different rows as samples, or a multiple, by chance."""
    net = Tuned(_deduplicated, 20).double()
    for words in ([[0, 1, 2], [2, 1, 0]], [[0, 1, 2], [3, 4, 0]], [[1, 0, 1], [0, 0, 1]]) * 2:
        count = len({word for row in words for word in row})
        with contextlib.suppress(*[] if count % 2 else [SampleMixingError]):
            _check(net, 10 + torch.tensor(words), _in_order(3)(2, 3))


def _routed(net: Any, x: Tensor) -> Tensor:
    tokens, found = x.flatten(0, 1), torch.zeros(x.shape[:2].numel(), D).double()
    for expert, own in ((net.a, net.route), (net.b, ~net.route)):
        found[own] = expert(tokens[own])
    out: Tensor = net.c(found)
    return out


@pytest.mark.parametrize("route", [[0, 3], [0], [0, 1, 2], [1, 2]])
def test_number_of_samples_with_experts(route: list[int]) -> None:
    """An expert that receives as many tokens as the model receives samples says nothing of them."""
    net: Any = Tuned(_routed).double()
    net.route = torch.tensor([n in route for n in range(4)])
    words = torch.randint(7, (2, 2))
    for is_extended in (True, False):
        _check(net, words, _in_order(2)(2, 2), is_extended)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_one_sample_with_experts(is_recorded: bool) -> None:
    net: Any = Tuned(_routed).double()
    net.is_recorded = is_recorded
    for route in ([0], [1], [0, 1]):
        net.route = torch.tensor([n in route for n in range(2)])
        _check(net, torch.tensor([[1, 2]]), torch.zeros(2, dtype=torch.long))


def test_experts_without_tokens_behind_rows_of_unknown_samples() -> None:
    """An operation with several outputs has data of several lengths."""

    def run(net: Any, x: Tensor) -> Tensor:
        order = torch.tensor([1, 0])
        low = net.low[1](torch.tanh(net.low[0](x[:, 0])))
        h = x[:, 0] + low
        parts = h[order].split(net.counts)
        found = torch.cat([net.a(parts[0]), net.b(parts[1])])[order]
        out: Tensor = net.c(found.repeat_interleave(2, 0))
        return out

    net: Any = Tuned(run)
    net.low = nn.ModuleList([nn.Linear(D, 1), nn.Linear(1, D)])
    net.double()
    for counts in ([1, 1], [0, 2], [2, 0]):
        net.counts = counts
        _check(net, torch.randint(7, (2, 2)), _in_order(2)(2, 2))


def test_parts_without_rows() -> None:
    """A slice of one row may be empty."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.c(x.mean(1)[None])
        return torch.cat([h[::2], h[1::2]])

    _check(Tuned(run).double(), torch.randint(7, (2, 2)), torch.arange(2)[None])


# Operations that leave rows where they are, between a model and an index.
KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda out: out,
    "movedim": lambda out: out.movedim(1, -1),
    "view": lambda out: out.view(-1, C),
    "slice": lambda out: out[:],
    "clone": lambda out: out.clone(),
    "twice": lambda out: out[...].unsqueeze(0).squeeze(0),
    "flipped": lambda out: out.flip(0).flip(0),
    "scaled": lambda out: 2 * out,
}
# Of three samples with four rows each: as many rows as two of each sample, and the second has none.
PICKED = torch.tensor([0, 2, 9, 10, 3, 11])


class Scaled(nn.Module):
    """A layer for rows of changed data; ``run`` is what happens behind it."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(D, C), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer((1 - 2.5 * x).flatten(0, 1)))


@pytest.mark.parametrize("check", ["always", "never"])
@pytest.mark.parametrize("name", KEEPING)
def test_rows_that_are_picked_behind_a_model(name: str, check: Any) -> None:
    net, x = Scaled(lambda out: out), torch.randn(3, 4, D)
    lossfunc, y = nn.CrossEntropyLoss(reduction="sum"), torch.randint(C, (12,))
    out = KEEPING[name](net(x))
    parameters = [*net.parameters()]
    expected = []
    for n in range(3):
        own = PICKED[n == PICKED // 4]
        loss = lossfunc(out[own], y[own])
        expected.append(torch.autograd.grad(loss, parameters, retain_graph=True))
    extend(net), extend(lossfunc)
    with backpack(BatchGrad(), check=check):
        lossfunc(KEEPING[name](net(x))[PICKED], y[PICKED]).backward()
    for parameter, *gradients in zip(parameters, *expected, strict=True):
        oracle.assert_close(vars(parameter)["grad_batch"], torch.stack(gradients))


@pytest.mark.parametrize("check", ["always", "never"])
def test_rows_that_are_picked_inside_a_model_of_which_a_sample_has_none(check: Any) -> None:
    """The index may also put rows into order, if those of the data are in another one."""
    net, lossfunc = extend(Scaled(lambda out: out[PICKED])), extend(nn.CrossEntropyLoss())
    loss = lossfunc(net(torch.randn(3, 4, D)), torch.randint(C, (6,)))
    with (
        pytest.raises(SampleMixingError, match="in another order than they go in"),
        backpack(BatchGrad(), check=check),
    ):
        loss.backward()


class Rewritten(nn.Module):
    """Rows that are put into another order and back; of one only, ``relu_`` leaves something."""

    def __init__(self, is_in_front: bool) -> None:
        super().__init__()
        self.front, self.layer, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, C)
        self.is_in_front = is_in_front

    def forward(self, x: Tensor) -> Tensor:
        order, level = torch.tensor([1, 0, 2]), torch.tensor([[100.0], [-100.0], [-100.0]])
        if self.is_in_front:
            h = self.layer(self.front(x)[order]) + level
            h.view(3, -1).relu_()
            return self.head(h)[order.argsort()]
        h = self.layer(x[order])[order.argsort()] + level
        h.view(3, -1).relu_()
        return h


@pytest.mark.parametrize("check", ["always", "never"])
def test_rows_of_which_a_rewrite_leaves_one(check: Any) -> None:
    """What is zero depends on nothing, but stays a row of its sample."""
    net, lossfunc = Rewritten(is_in_front=True), nn.CrossEntropyLoss(reduction="sum")
    x, y = torch.randn(3, D), torch.randint(C, (3,))
    parameters, out = [*net.parameters()], net(x)
    expected = [
        torch.autograd.grad(lossfunc(out[n : n + 1], y[n : n + 1]), parameters, retain_graph=True)
        for n in range(3)
    ]
    extend(net), extend(lossfunc)
    with backpack(BatchGrad(), check=check):
        lossfunc(net(x), y).backward()
    for parameter, *gradients in zip(parameters, *expected, strict=True):
        oracle.assert_close(vars(parameter)["grad_batch"], torch.stack(gradients))


@pytest.mark.parametrize("check", ["always", "never"])
def test_data_in_another_order_of_which_a_rewrite_leaves_one(check: Any) -> None:
    net, lossfunc = extend(Rewritten(is_in_front=False)), extend(nn.MSELoss())
    loss = lossfunc(net(torch.randn(3, D)), torch.randn(3, D))  # the data are gone by now
    with (
        pytest.raises(SampleMixingError, match="in another order than they go in"),
        backpack(BatchGrad(), check=check),
    ):
        loss.backward()
