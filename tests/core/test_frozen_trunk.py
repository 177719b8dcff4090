"""Rows of what frozen layers made, joined, picked or turned before the first trained layer.

Nothing of this is recorded. Values tell which rows are whose, if a layer made the rows. Otherwise
an error is raised, unless the model asks for a record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core._torch import memory_of
from backpack_core.errors import SampleMixingError, ShapeError
from backpack_core.extensions import BatchGrad, BatchL2Grad, DiagGGNExact
from backpack_core.record.call import Edge, site_at
from tests import oracle

N, T, D, C = 3, 4, 5, 3
ORDER = torch.tensor([7, 2, 11, 5, 0, 8])  # tokens: one of sample 0 more than of sample 1
MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)


class Net(nn.Module):
    """A frozen trunk, and trained layers behind it.

    Attributes:
        gather: What the model does with the trunk and its input.
        way: What surrounds the trunk.
        is_functional: Whether the first trained weight belongs to no layer.
    """

    def __init__(self, gather: Callable[[Any, Tensor], Tensor], way: str = "") -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D))
        self.trunk.requires_grad_(False)
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, C)
        self.gather, self.way, self.is_functional = gather, way, False

    def made(self, x: Tensor) -> Tensor:
        """What the trunk makes of some data."""
        with torch.set_grad_enabled("no_grad" not in self.way):
            made: Tensor = self.trunk(x)
        made = made + x if "residual" in self.way else made
        return made.requires_grad_() if "recorded" in self.way else made

    def forward(self, x: Tensor) -> Tensor:
        rows = self.gather(self.made, x)
        is_own = self.is_functional
        h = F.linear(rows, self.layer.weight, self.layer.bias) if is_own else self.layer(rows)
        out: Tensor = self.head(torch.tanh(h))
        return out.flatten(0, -2)


Gather = tuple[Callable[[Any, Tensor], Tensor], Tensor]
SAMPLES = torch.arange(N)
GATHERS: dict[str, Gather] = {
    "joined": (lambda f, x: torch.cat([f(x[:, 0]), f(x[:, 1])]), SAMPLES.repeat(2)),
    "stacked": (
        lambda f, x: torch.stack([f(x[:, 0]), f(x[:, 1])], 1).flatten(0, 1),
        SAMPLES.repeat_interleave(2),
    ),
    "time first": (lambda f, x: f(x).transpose(0, 1).reshape(-1, D), SAMPLES.repeat(T)),
    "a mask": (lambda f, x: f(x)[MASK], MASK.nonzero()[:, 0]),
    "a mask, unevenly": (lambda f, x: f(x)[~MASK][:5], (~MASK).nonzero()[:5, 0]),
    "an index": (lambda f, x: f(x).flatten(0, 1)[ORDER], ORDER // T),
    "an order within": (lambda f, x: f(x).flip(1).reshape(-1, D), SAMPLES.repeat_interleave(T)),
}

# Known by what layers made, or made it of; if operations did, lengths could mislead.
BY_VALUES: dict[str, Gather] = {
    "two views": (lambda f, x: torch.stack([f(x[:, 0]), f(x[:, 1])]), SAMPLES.repeat(2)),
    "three views": (lambda f, x: torch.stack([f(x[:, t]) for t in range(N)]), SAMPLES.repeat(N)),
    "as many tokens": (lambda f, x: f(x)[[0, 2, 2], [0, 1, 0]], torch.tensor([0, 2, 2])),
    "a mask before": (lambda f, x: f(x[MASK]), MASK.nonzero()[:, 0]),
    "as many before": (lambda f, x: f(x.flatten(0, 1)[[1, 2, 9]]), torch.tensor([0, 0, 2])),
    "before and behind": (lambda f, x: f(f(x[MASK])[[4, 0, 1]]), torch.tensor([2, 0, 0])),
    "parts": (
        lambda f, x: torch.cat([f(x[1:]), f(x[:1])]).flatten(0, 1),
        torch.tensor([1, 2, 0]).repeat_interleave(T),
    ),
    "one of them": (lambda f, x: f(x[1])[:N], torch.tensor([1, 1, 1])),
    "time first, picked": (
        lambda f, x: f(x.transpose(0, 1))[[3, 1]].flatten(0, 1),
        SAMPLES.repeat(2),
    ),
    "turned between": (
        lambda f, x: f(f(x[:, :N]).transpose(0, 1))[[1, 0]].flatten(0, 1),
        SAMPLES.repeat(2),
    ),
    "beside data": (lambda f, x: torch.cat([x[:, 0], f(x[:, 1])]), SAMPLES.repeat(2)),
}

# Rows are a view of a tensor with an entry for each sample in front.
IN_FRONT = {"stacked", "an order within"}


def _individual(net: Net, x: Tensor, y: Tensor, owners: Tensor) -> list[Tensor]:
    losses = F.cross_entropy(net(x), y, reduction="none") / len(y)
    parameters = [net.layer.weight, net.layer.bias, net.head.weight]
    of = [
        torch.autograd.grad(losses[owners == n].sum(), parameters, retain_graph=True)
        for n in range(N)
    ]
    return [torch.stack(each) for each in zip(*of, strict=True)]


def _found(net: Net, x: Tensor, y: Tensor) -> list[Tensor]:
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(net(x), y).backward()
    return [net.layer.weight.grad_batch, net.layer.bias.grad_batch, net.head.weight.grad_batch]  # type: ignore[list-item,union-attr]


@pytest.mark.parametrize("way", ["", "no_grad", "recorded"])
@pytest.mark.parametrize("name", [*GATHERS, *BY_VALUES])
def test_rows_of_what_layers_made(name: str, way: str) -> None:
    gather, owners = {**GATHERS, **BY_VALUES}[name]
    net, y = extend(Net(gather, way).double()), torch.randint(C, owners.shape)
    for _ in range(3):  # a plan serves the later passes
        x = torch.randn(N, T, D).double()
        for ours, expected in zip(_found(net, x, y), _individual(net, x, y, owners), strict=True):
            oracle.assert_close(ours, expected)


@pytest.mark.parametrize("is_functional", [True, False])
@pytest.mark.parametrize("name", GATHERS)
def test_rows_of_what_operations_made(name: str, is_functional: bool) -> None:
    """Nothing shows them, so that individual gradients are refused; sums of curvature are not."""
    gather, owners = GATHERS[name]
    net: Any = Net(gather, "residual").double()
    net.is_functional = is_functional
    x, y = torch.randn(N, T, D).double(), torch.randint(C, owners.shape)
    extend(net)
    expected = _individual(net, x, y, owners)
    if name in IN_FRONT:
        for ours, each in zip(_found(net, x, y), expected, strict=True):
            oracle.assert_close(ours, each)
    else:
        with pytest.raises((SampleMixingError, ShapeError), match=r"requires_grad_\(\)"):
            _found(net, x, y)
    net.way = "residual, recorded"
    for ours, each in zip(_found(net, x, y), _individual(net, x, y, owners), strict=True):
        oracle.assert_close(ours, each)


def test_the_refusal_says_what_to_write() -> None:
    net = extend(Net(GATHERS["joined"][0], "residual").double())
    with pytest.raises(SampleMixingError, match=r"Linear 'layer' received 6 rows .* 3 samples"):
        _found(net, torch.randn(N, T, D).double(), torch.randint(C, (2 * N,)))


def test_curvature_is_a_sum_over_rows_in_any_order() -> None:
    gather, owners = GATHERS["joined"]
    x, y = torch.randn(N, T, D).double(), torch.randint(C, owners.shape)
    net = extend(Net(gather, "residual").double())
    found = []
    for way in ("residual", "residual, recorded"):
        with backpack(DiagGGNExact()):
            net.way = way
            extend(nn.CrossEntropyLoss())(net(x), y).backward()
        found.append(net.layer.weight.diag_ggn_exact)  # type: ignore[union-attr]
    oracle.assert_close(found[0], found[1])


def test_masks_change_from_pass_to_pass() -> None:
    masks = [MASK, ~MASK, MASK.flip(0), MASK]
    net: Any = extend(Net(lambda f, x: f(x)[net.mask]).double())
    for net.mask in masks:
        owners = net.mask.nonzero()[:, 0]
        x, y = torch.randn(N, T, D).double(), torch.randint(C, owners.shape)
        for ours, expected in zip(_found(net, x, y), _individual(net, x, y, owners), strict=True):
            oracle.assert_close(ours, expected)


def test_equal_rows_of_several_samples_are_refused() -> None:
    net = extend(Net(GATHERS["a mask"][0]).double())
    x = torch.randn(N, T, D).double()
    x[1] = x[0]
    with pytest.raises(SampleMixingError, match=r"requires_grad_\(\)"):
        _found(net, x, torch.randint(C, (int(MASK.sum()),)))


def test_samples_in_another_order_are_refused() -> None:
    net = extend(Net(lambda f, x: f(x[:, 0])[[2, 0, 1]]).double())
    with pytest.raises(SampleMixingError, match="another order"):
        _found(net, torch.randn(N, T, D).double(), torch.randint(C, (N,)))


def test_rows_with_one_result_for_each_sample_need_no_order() -> None:
    """The net makes one row of several, which are in a row then."""
    net: Any = Net(lambda f, x: torch.relu(f(x).reshape(-1, D)), "residual").double()
    net.head = nn.Sequential(nn.Unflatten(0, (N, T)), nn.Flatten(), nn.Linear(T * D, C)).double()
    x, y = torch.randn(N, T, D).double(), torch.randint(C, (N,))
    losses = F.cross_entropy(net(x), y, reduction="none") / N
    expected = [
        torch.autograd.grad(loss, net.layer.weight, retain_graph=True)[0] for loss in losses
    ]
    extend(net)
    with backpack(BatchL2Grad()):
        extend(nn.CrossEntropyLoss())(net(x), y).backward()
    oracle.assert_close(net.layer.weight.batch_l2, torch.stack(expected).flatten(1).square().sum(1))


def test_pixels_of_what_a_frozen_convolution_made() -> None:
    net: Any = Net(lambda f, x: net.conv(x).movedim(1, -1).reshape(-1, D)[::2]).double()
    net.conv = nn.Conv2d(2, D, 2).double().requires_grad_(False)
    extend(net)
    owners = SAMPLES.repeat_interleave(4)[::2]
    for _ in range(3):
        x, y = torch.randn(N, 2, 3, 3).double(), torch.randint(C, owners.shape)
        for ours, expected in zip(_found(net, x, y), _individual(net, x, y, owners), strict=True):
            oracle.assert_close(ours, expected)


def test_rows_that_the_user_assigns_to_samples() -> None:
    """``samples=`` says whose the rows are; behind a frozen layer, they are turned."""
    index = torch.tensor([1, 0, 0])
    net = extend(Net(lambda f, x: f(x[:, 0]).flip(0)).double())
    x, y = torch.randn(N, T, D).double(), torch.randint(C, (N,))
    expected = _individual(net, x, y, index.flip(0))
    with backpack(BatchGrad(), samples=index):
        extend(nn.CrossEntropyLoss())(net(x), y).backward()
    oracle.assert_close(net.layer.weight.grad_batch, expected[0][:2])


@pytest.mark.parametrize("views", [2, 4])
def test_views_of_changed_data_in_front_of_samples_are_refused(views: int) -> None:
    net = extend(Net(lambda f, x: torch.stack([k * x[:, 0] for k in range(1, 1 + views)])).double())
    with pytest.raises(SampleMixingError, match=r"requires_grad_\(\)"):
        _found(net, torch.randn(N, T, D).double(), torch.randint(C, (views * N,)))


JOINS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "behind": lambda f, x: torch.cat([f(x), 2 * x]),
    "in front": lambda f, x: torch.cat([2 * x, f(x)]),
    "on both sides": lambda f, x: torch.cat([x, f(x), 2 * x]),
    "in another order": lambda f, x: torch.cat([f(x), x[[2, 0, 1]]]),
    "picked": lambda f, x: torch.cat([f(x), x])[[0, 2, 4, 3, 5]],
}


@pytest.mark.parametrize("is_functional", [True, False])
@pytest.mark.parametrize("name", JOINS)
def test_rows_joined_with_data(name: str, is_functional: bool) -> None:
    """There is one row of the data for each sample, so its length tells whose it is."""
    net: Any = extend(Net(lambda f, x: x).double())
    layer = net.layer

    def forward(x: Tensor) -> Tensor:
        made = (lambda t: F.linear(t, layer.weight, layer.bias)) if is_functional else layer
        out: Tensor = net.head(JOINS[name](made, x))
        return out

    net.forward = forward
    owners = JOINS[name](lambda t: t, SAMPLES[:, None].double()).flatten()
    is_changed = name in ("behind", "in front", "on both sides")
    owners = SAMPLES.repeat(len(owners) // N) if is_changed else owners.long()
    for _ in range(3):
        x, y = torch.randn(N, D).double(), torch.randint(C, owners.shape)
        for ours, expected in zip(_found(net, x, y), _individual(net, x, y, owners), strict=True):
            oracle.assert_close(ours, expected)


def test_nothing_that_layers_made_is_held() -> None:
    held: list[weakref.ref[Tensor]] = []

    def gather(trunk: Any, x: Tensor) -> Tensor:
        made = trunk(x)
        held.append(weakref.ref(made))
        picked: Tensor = made[MASK]
        return picked

    net = extend(Net(gather).double())
    loss = net(torch.randn(N, T, D).double()).sum()
    assert held[0]() is None
    loss.backward()


def test_what_is_noted_of_layers_has_one_memory() -> None:
    """Many small tensors that stay, between large ones that go, would split up the heap."""
    net = extend(Net(lambda f, x: (f(f(x) + x) + x).mean(1), "residual").double())
    out = net(torch.randn(N, T, D).double())
    site = site_at(Edge(out.grad_fn, out.output_nr))
    assert site is not None
    sums = [made.sums.rows for made in site.call.run.made]
    assert len(sums) > 1
    assert len({memory_of(each) for each in sums}) == 1


def _of_samples(net: Net, x: Tensor, y: Tensor) -> list[tuple[Tensor, ...]]:
    """Gradients of each sample's part of the mean."""
    losses = nn.CrossEntropyLoss(reduction="none")(net(x), y).view(N, T).sum(1) / (N * T)
    parameters = [*net.layer.parameters(), *net.head.parameters()]
    return [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]


def _agrees(net: Net, expected: list[tuple[Tensor, ...]]) -> None:
    parameters = [*net.layer.parameters(), *net.head.parameters()]
    for parameter, *gradients in zip(parameters, *expected, strict=True):
        oracle.assert_close(vars(parameter)["grad_batch"], torch.stack(gradients))


PUT_BACK: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "index_copy": lambda made, x, order: torch.empty_like(x).index_copy(0, order, made(x[order])),
    "index": lambda made, x, order: made(x[order])[order.argsort()],
    "functions": lambda made, x, order: made(made(x)[order] + 0 * x)[order.argsort()],
}


@pytest.mark.parametrize("check", ["always", "never"])
@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("name", PUT_BACK)
def test_rows_put_back_if_the_input_is_gone(name: str, is_gone: bool, check: Any) -> None:
    """Rows in an order by values, as for packing; a loop may hold the data on another device."""
    order = torch.tensor([2, 0, 1])
    net = Net(lambda made, x: PUT_BACK[name](made, x, order))
    x, y, lossfunc = torch.randn(N, T, D), torch.randint(C, (N * T,)), nn.CrossEntropyLoss()
    expected = _of_samples(net, x, y)
    extend(net), extend(lossfunc)
    for _ in range(3):
        given = x.clone()
        loss = lossfunc(net(given), y)
        if is_gone:
            del given
        with backpack(BatchGrad(), check=check):
            loss.backward()
        _agrees(net, expected)


@pytest.mark.parametrize("check", ["always", "never"])
@pytest.mark.parametrize("way", ["recorded", "put back", "left"])
def test_rows_in_another_order_that_functions_change(way: str, check: Any) -> None:
    """Behind a function, nothing shows whether a frozen layer received rows in order."""
    order = torch.tensor([2, 0, 1])

    def gather(made: Any, x: Tensor) -> Tensor:
        rows = made(made(x[order]).sin())
        return rows if way == "left" else rows[order.argsort()]

    net = Net(gather, way)
    x, y, lossfunc = torch.randn(N, T, D), torch.randint(C, (N * T,)), nn.CrossEntropyLoss()
    expected = _of_samples(net, x, y)
    extend(net), extend(lossfunc)
    loss = lossfunc(net(x), y)
    with backpack(BatchGrad(), check=check):
        if way != "recorded":
            with pytest.raises((ShapeError, SampleMixingError)):
                loss.backward()
            return
        loss.backward()
    _agrees(net, expected)


class SortedTexts(nn.Module):
    """Puts texts into an order before a frozen table, as for packing, and back behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, D).requires_grad_(False), nn.Linear(D, C)
        self.order = torch.tensor([2, 0, 1])

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids[self.order])[self.order.argsort()]
        out: Tensor = self.head(rows.flatten(0, 1))
        return out


@pytest.mark.parametrize("check", ["always", "never"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_tokens_in_another_order(is_gone: bool, check: Any) -> None:
    net, ids = SortedTexts(), torch.tensor([[0, 8, 4], [7, 2, 3], [5, 1, 6]])  # of equal sums
    lossfunc, y = nn.CrossEntropyLoss(reduction="sum"), torch.randint(C, (9,))
    losses = nn.CrossEntropyLoss(reduction="none")(net(ids), y).view(3, 3).sum(1)
    weight = net.head.weight
    expected = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses]
    extend(net), extend(lossfunc)
    for _ in range(2):
        given = ids.clone()
        loss = lossfunc(net(given), y)
        if is_gone:
            del given
        with backpack(BatchGrad(), check=check):
            loss.backward()
        oracle.assert_close(vars(weight)["grad_batch"], torch.stack(expected))
