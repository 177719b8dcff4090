"""Losses that receive several entries of each sample, in any order: whose is whose is not said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, ShapeError
from backpack_core.extensions import (
    GGNMP,
    BatchDiagGGNExact,
    BatchGrad,
    DiagGGNExact,
    SqrtGGNExact,
)
from tests.cases import Net

N, T, C = 4, 6, 3


def _shuffled(z: Tensor) -> Tensor:
    order = torch.randperm(N * T, generator=torch.Generator().manual_seed(3))
    return z.flatten(0, 1)[order]


def _masked(z: Tensor) -> Tensor:
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1])
    return z[mask.bool().view(N, T)]


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "samples_first": lambda z: z.flatten(0, 1),
    "positions_first": lambda z: z.transpose(0, 1).flatten(0, 1),
    "steps": lambda z: torch.cat([z[:, t] for t in range(T)]),
    "shuffled": _shuffled,
    "masked": _masked,
}


@pytest.mark.parametrize("order", ORDERS)
def test_curvature_of_a_loss_of_merged_entries(order: str) -> None:
    model, arrange = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, C)), ORDERS[order]
    inputs = torch.randn(N, T, 2)
    logits = arrange(extend(model)(inputs))
    loss = extend(nn.CrossEntropyLoss())(logits, torch.randint(0, C, (len(logits),)))
    with backpack(DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact(), GGNMP(), BatchGrad()):
        loss.backward()
    owners = arrange(torch.arange(N)[:, None, None].expand(N, T, 1))[:, 0]
    rows = arrange(model(inputs))
    for parameter in model.parameters():
        expected, product = torch.zeros(N, *parameter.shape), torch.zeros_like(parameter)
        vector = torch.randn_like(parameter)
        for owner, row in zip(owners, rows, strict=True):
            p = row.softmax(0).detach()
            hessian = (p.diag() - p.outer(p)) / len(rows)
            jacobian = torch.stack(
                [torch.autograd.grad(z, parameter, retain_graph=True)[0] for z in row]
            ).flatten(1)
            product += (jacobian.T @ hessian @ jacobian @ vector.flatten()).view_as(parameter)
            diagonal = torch.einsum("ij,ik,kj->j", jacobian, hessian, jacobian)
            expected[owner] += diagonal.view_as(parameter)
        found = vars(parameter)
        torch.testing.assert_close(found["diag_ggn_exact_batch"], expected)
        torch.testing.assert_close(found["diag_ggn_exact"], expected.sum(0))
        torch.testing.assert_close(found["sqrt_ggn_exact"].square().sum(0), expected)
        torch.testing.assert_close(found["ggnmp"](vector), product)


@pytest.mark.parametrize("order", ["positions_first", "steps"])
def test_of_one_sample_there_is_one_order(order: str) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, C)), torch.randn(1, T, 2)
    target, found = torch.arange(T) % C, []
    for arrange in (ORDERS["samples_first"], ORDERS[order]):
        loss = extend(nn.CrossEntropyLoss())(arrange(extend(model)(inputs)), target)
        with backpack(DiagGGNExact(), BatchGrad()):
            loss.backward()
        values = map(vars, model.parameters())
        found.append([(v["diag_ggn_exact"].clone(), v["grad_batch"].clone()) for v in values])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("batch", [3, T])
def test_merged_entries_of_positions_first(batch: int) -> None:
    """A head gets one position of one sample after the other."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).transpose(0, 1).reshape(-1, 4)
        return net.b(torch.tanh(h))  # type: ignore[no-any-return]

    model, x = Net(forward, a=nn.Linear(2, 4), b=nn.Linear(4, C)), torch.randn(batch, T, 2)
    y, parameters = torch.randint(0, C, (T, batch)), [*model.parameters()]
    terms = [nn.functional.cross_entropy(model(x[n : n + 1]), y[:, n]) for n in range(batch)]
    single = [torch.autograd.grad(term / batch, parameters) for term in terms]
    with backpack(BatchGrad()):
        nn.functional.cross_entropy(extend(model)(x), y.flatten()).backward()
    for parameter, gradients in zip(parameters, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(vars(parameter)["grad_batch"], torch.stack(gradients))


PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda z: z[torch.arange(N * T).view(N, T) % 5 < 2],
    "flat_mask": lambda z: z.flatten(0, 1)[torch.arange(N * T) % 3 == 1],
    "last": lambda z: z[torch.arange(N), torch.tensor([5, 2, 0, 3])],
    "as_many_as_samples": lambda z: z[[0, 0, 2, 3], [1, 2, 0, 0]],
    "negative": lambda z: z.flatten(0, 1)[torch.tensor([-1, 5, -9])],
    "selected": lambda z: z.flatten(0, 1).index_select(0, torch.tensor([3, 17, 2, 8, 9])),
    "samples": lambda z: z.mean(1)[torch.tensor([True, False, True, True])],
}


@pytest.mark.parametrize("way", PICKED)
def test_a_function_of_picked_entries(way: str) -> None:
    model, pick = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, C)), PICKED[way]
    inputs = torch.randn(N, T, 2)
    logits = pick(extend(model)(inputs))
    target = torch.randint(0, C, (len(logits),))
    with backpack(BatchGrad(), check="always"):
        nn.functional.cross_entropy(logits, target).backward()
    owners = pick(torch.arange(1.0 * N)[:, None, None].expand(N, T, 1))[:, 0]
    terms = nn.functional.cross_entropy(pick(model(inputs)), target, reduction="none") / len(target)
    for n in range(N):
        own = torch.autograd.grad(
            terms[owners == n].sum(), list(model.parameters()), retain_graph=True
        )
        for parameter, expected in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(vars(parameter)["grad_batch"][n], expected)


TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "classes": lambda z: nn.functional.nll_loss(
        z.log_softmax(1), torch.zeros(len(z), dtype=torch.long), reduction="none"
    ),
    "largest": lambda z: z.logsumexp(1),
    "in_a_row": lambda z: z.view(-1).square(),
    "behind_an_axis": lambda z: z.unsqueeze(0).squeeze(0).exp(),
}


@pytest.mark.parametrize("way", TERMS)
def test_terms_of_picked_entries(way: str) -> None:
    """None, one or several terms of each, in functions that are not linear."""
    model, mask = nn.Linear(2, C), torch.arange(N * T).view(N, T) % 5 < 2
    inputs = torch.randn(N, T, 2)
    with backpack(BatchGrad(), check="always"):
        TERMS[way](extend(model)(inputs)[mask]).sum().backward()
    found = vars(model.weight)["grad_batch"]
    for n in range(N):
        loss = TERMS[way](model(inputs[n])[mask[n]]).sum()
        torch.testing.assert_close(found[n], *torch.autograd.grad(loss, [model.weight]))


@pytest.mark.parametrize("way", PICKED)
def test_picked_entries_that_mix(way: str) -> None:
    model = extend(nn.Linear(2, C))
    z = PICKED[way](model(torch.randn(N, T, 2)))
    loss = nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        loss.backward()


def test_an_extended_loss_of_selected_entries_says_what_to_do() -> None:
    model, lossfunc = extend(nn.Linear(2, C)), extend(nn.CrossEntropyLoss())
    kept = torch.tensor([True, False, True, True])
    inputs, target = torch.randn(N, 2), torch.randint(0, C, (N,))
    logits = model(inputs)
    some = logits.topk(3, 0)[0]  # a mask would say whose they are
    with pytest.raises(ShapeError, match=r"reduction='none', then \[mask\]"), backpack(BatchGrad()):
        lossfunc(some, target[kept]).backward()
    several = extend(nn.CrossEntropyLoss(reduction="none"))
    with backpack(DiagGGNExact()):
        several(model(inputs), target)[kept].mean().backward()
    found = vars(model.weight)["diag_ggn_exact"]
    with backpack(DiagGGNExact()):
        lossfunc(model(inputs[kept]), target[kept]).backward()
    torch.testing.assert_close(vars(model.weight)["diag_ggn_exact"], found)


def test_samples_in_another_order_may_be_paired_with_other_targets() -> None:
    model = extend(nn.Linear(2, C))
    logits = model(torch.randn(N, 2))[torch.tensor([1, 0, 3, 2])]
    loss = nn.functional.cross_entropy(logits, torch.arange(N) % C)
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("order", ["samples_first", "positions_first"])
def test_axes_that_are_merged_before_the_first_layer(order: str) -> None:
    first, last = nn.Linear(2, 3), nn.Linear(3, C)
    model = extend(
        Net(lambda net, x: net.last(net.first(ORDERS[order](x)).tanh()), first=first, last=last)
    )
    inputs, targets = torch.randn(N, T, 2), torch.randint(0, C, (N, T))
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(BatchGrad(), BatchDiagGGNExact()):
        lossfunc(model(inputs), ORDERS[order](targets[..., None])[:, 0]).backward()
    found = [(p.grad_batch, p.diag_ggn_exact_batch) for p in model.parameters()]
    for n in range(N):
        with backpack(BatchGrad(), DiagGGNExact()):
            lossfunc(model(inputs[n : n + 1]), targets[n]).backward()
        for p, (gradients, diagonals) in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(gradients[n], p.grad_batch.sum(0))
            torch.testing.assert_close(diagonals[n], p.diag_ggn_exact)
