"""Plans of passes in which an index says which rows are whose: they hold while it says the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError, SampleMixingError
from backpack_core.extensions import BatchGrad, DiagGGNExact, DiagGGNMC
from tests.cases import Net

N, T, PASSES = 4, 3, 15

EXTENSIONS: dict[str, Callable[[], Any]] = {
    "some": lambda: BatchGrad(subsampling=[2, 0]),
    "exact": DiagGGNExact,
    "sampled": DiagGGNMC,
}


def last(h: Tensor, number: int) -> Tensor:
    """One position of each sample, as classifiers of sequences take the last token."""
    return h[torch.arange(len(h)), torch.randint(T, (len(h),))]


def masked(h: Tensor, number: int) -> Tensor:
    """As many positions of each sample, but in every third pass of other samples."""
    mask = torch.zeros(len(h), T, dtype=torch.bool)
    mask[:, number % T] = True
    if number % 3 == 2:
        mask[0], mask[1] = True, False
        mask[2], mask[3] = torch.tensor([True, False, False]), False
    return h[mask]


def permuted(h: Tensor, number: int) -> Tensor:
    """Samples in another order, which changes now and then."""
    order = torch.roll(torch.arange(len(h)), number // 4)
    return h.mean(1)[order]


def back_and_forth(h: Tensor, number: int) -> Tensor:
    """In another order, and back again."""
    order = torch.randperm(len(h))
    return h.mean(1)[order][order.argsort()]


def drawn_rows(h: Tensor, number: int) -> Tensor:
    """Some samples twice, and others not at all."""
    return h.mean(1)[torch.randint(len(h), (len(h),)).sort()[0]]


def selected(h: Tensor, number: int) -> Tensor:
    return h.transpose(0, 1).index_select(1, torch.arange(len(h))).sum(0)


def gathered(h: Tensor, number: int) -> Tensor:
    where = torch.randint(T, (len(h), 1, 1)).expand(-1, 1, h.shape[2])
    return h.gather(1, where).squeeze(1)


def scattered(h: Tensor, number: int) -> Tensor:
    order = torch.arange(len(h)) if number % 4 else torch.randperm(len(h))
    return torch.zeros_like(h[:, 0]).index_add(0, order, h.sum(1))


def written(h: Tensor, number: int) -> Tensor:
    order = torch.arange(len(h)) if number % 4 else torch.randperm(len(h))
    out = torch.zeros_like(h[:, 0])
    out[order] = h.sum(1)
    return out


def scattered_inside(h: Tensor, number: int) -> Tensor:
    where = torch.randint(h.shape[2], (len(h), h.shape[2]))
    return torch.zeros_like(h[:, 0]).scatter_add(1, where, h.sum(1))


PICKS = [
    written, scattered_inside,
    last, masked, permuted, back_and_forth, drawn_rows, selected, gathered, scattered,
]  # fmt: skip


class Picking(nn.Module):
    def __init__(self, pick: Callable[[Tensor, int], Tensor], is_late: bool) -> None:
        super().__init__()
        self.embed, self.a, self.c = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.pick, self.is_late, self.number = pick, is_late, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.embed(x)).tanh()
        if self.is_late:
            return self.pick(self.c(h), self.number)
        return self.c(self.pick(h, self.number))


def passed(model: nn.Module, seed: int, make: Callable[[], Any]) -> tuple[Any, Any]:
    """What a pass gives, or the kind of its error; and how many passes took a plan."""
    torch.manual_seed(seed)
    extend(model)
    model.number = seed  # type: ignore[assignment]
    lossfunc, (x, y) = (
        extend(nn.CrossEntropyLoss()),
        (torch.randint(7, (N, T)), torch.arange(N) % 3),
    )
    model.zero_grad()
    loss, extension = lossfunc(model(x), y), make()
    block = backpack(extension)
    try:
        with block:
            loss.backward()
    except BackpackError as error:
        return type(error), block._history
    return [getattr(p, extension.savefield) for p in model.parameters()], block._history


@pytest.mark.plans
@pytest.mark.grid(6)
@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("pick", PICKS)
def test_plans_hold_while_an_index_says_the_same(
    pick: Callable[[Tensor, int], Tensor], is_late: bool, extension: str
) -> None:
    """A copy of the model has no plan, so that its passes are surveyed."""
    torch.manual_seed(0)
    model, make = Picking(pick, is_late).double(), EXTENSIONS[extension]
    planned = 0
    for seed in range(PASSES):
        fresh = copy.deepcopy(model)
        found, history = passed(model, seed, make)
        expected, surveyed = passed(fresh, seed, make)
        planned += history["planned before"]
        assert not surveyed["planned before"]
        if isinstance(expected, list) and isinstance(found, list):
            for ours, right in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)
        else:
            assert found == expected
    if pick in (last, gathered, selected, back_and_forth):
        assert planned


def _columns(h: Tensor, order: Tensor) -> Tensor:
    return order.unsqueeze(1).expand_as(h)


def _one_by_one(h: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for row, number in zip(h, order.tolist(), strict=True):
        out[number] = row
    return out


PUT_BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda h, order: h[order.argsort()],
    "index_select": lambda h, order: h.index_select(0, order.argsort()),
    "gather": lambda h, order: h.gather(0, _columns(h, order.argsort())),
    "embedding": lambda h, order: nn.functional.embedding(order.argsort(), h),
    "index_put": lambda h, order: torch.zeros_like(h).index_put((order,), h),
    "index_copy": lambda h, order: torch.zeros_like(h).index_copy(0, order, h),
    "index_copy, from behind": lambda h, order: torch.zeros_like(h).index_copy(-2, order, h),
    "index_add": lambda h, order: torch.zeros_like(h).index_add(0, order, h),
    "scatter": lambda h, order: torch.zeros_like(h).scatter(0, _columns(h, order), h),
    "scatter_add": lambda h, order: torch.zeros_like(h).scatter_add(0, _columns(h, order), h),
    "one by one": _one_by_one,
}


@pytest.mark.plans
@pytest.mark.parametrize("put_back", PUT_BACK)
def test_rows_that_are_in_order_in_the_measured_passes_only(put_back: str) -> None:
    """The model's input is gone by the backward pass, so only the index tells their order."""

    def forward(net: Any, x: Tensor, order: Tensor) -> Tensor:
        return PUT_BACK[put_back](net.layer(x[order]), order)

    model, planned = extend(Net(forward, layer=nn.Linear(3, 2))), 0
    for _ in range(5):  # the next one would not be measured
        loss = model(torch.randn(N, 3), torch.arange(N)).square().sum()
        with backpack(BatchGrad()) as block:
            loss.backward()
        planned += block._history["planned before"]
    assert planned or put_back == "one by one"  # a view that was overwritten has no plan
    for _ in range(3):
        loss = model(torch.randn(N, 3), torch.arange(N).roll(1)).square().sum()
        with pytest.raises(SampleMixingError), backpack(BatchGrad()):
            loss.backward()


@pytest.mark.plans
def test_rows_of_tables_are_picked_in_any_order_without_measurements() -> None:
    def forward(net: Any, x: Tensor, kinds: Tensor) -> Tensor:
        return net.head(torch.tanh(net.layer(x) + net.kinds.weight[kinds]))

    parts = {"layer": nn.Linear(3, 3), "kinds": nn.Embedding(N, 3), "head": nn.Linear(3, 2)}
    model, planned = extend(Net(forward, **parts)), 0
    for number in range(PASSES):
        loss = model(torch.randn(N, 3), torch.arange(N).roll(number)).square().sum()
        with backpack(BatchGrad()) as block:
            loss.backward()
        planned += block._history["planned before"]
    assert planned >= PASSES - 5
