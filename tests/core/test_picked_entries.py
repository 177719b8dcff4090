"""Losses and heads of entries that were picked, ``logits[mask]``: the index says whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    SqrtGGNExact,
)
from tests.cases import Net

N, T, C = 4, 6, 3
MASK = torch.arange(N * T).view(N, T) % 5 < 2  # 10 entries of 4 samples

PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda z: z[MASK],
    "flat": lambda z: z.flatten(0, 1)[MASK.flatten()],
    "selected": lambda z: z.flatten(0, 1).index_select(0, torch.tensor([3, 17, 2, 8, 9])),
    "shuffled": lambda z: z.flatten(0, 1)[torch.tensor([7, 1, 20, 2, -1, 3, 12])],
    "multiple": lambda z: z[[0, 0, 2, 3, 0, 2, 2, 1], [1, 2, 0, 0, 3, 3, 1, 5]],
    "one": lambda z: z[[2], [1]],
    "fewer": lambda z: z[[2, 1, 1], [1, 2, 3]],
    "as_many_as_samples": lambda z: z[[0, 0, 2, 3], [1, 2, 0, 0]],
}


def _direct(net: Any, x: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
    return pick(net.b(torch.tanh(net.a(x))))  # type: ignore[no-any-return]


def _head(net: Any, x: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
    return net.b(torch.tanh(pick(net.a(x))))  # type: ignore[no-any-return]


def _branches(net: Any, x: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
    h = torch.tanh(net.a(x))
    return pick(net.b(h)) + net.b(pick(h).sin())  # type: ignore[no-any-return]


def _table(net: Any, x: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
    """A parameter that a function adds to what was picked, and one that is looked up."""
    h = pick(net.a(x)) + net.c.weight[0]
    return net.b(torch.tanh(h * net.c.weight[torch.arange(len(h)) % 8]))  # type: ignore[no-any-return]


SHAPES = {"direct": _direct, "head": _head, "branches": _branches, "table": _table}


def _net(forward: Callable[..., Tensor], pick: Callable[[Tensor], Tensor]) -> Net:
    layers = {"a": nn.Linear(2, 5), "b": nn.Linear(5, C)}
    if forward is _table:
        layers["c"] = nn.Linear(5, 8, bias=False)
    return Net(lambda net, x: forward(net, x, pick), **layers)


def _owners(pick: Callable[[Tensor], Tensor]) -> Tensor:
    return pick(torch.arange(1.0 * N)[:, None, None].expand(N, T, 1))[:, 0]


@pytest.mark.parametrize("way", PICKED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_extended", [True, False])
def test_individual_gradients(way: str, shape: str, is_extended: bool) -> None:
    pick, inputs = PICKED[way], torch.randn(N, T, 2)
    model = _net(SHAPES[shape], pick)
    logits = extend(model)(inputs)
    target = torch.randint(0, C, (len(logits),))
    lossfunc = extend(nn.CrossEntropyLoss()) if is_extended else nn.functional.cross_entropy
    with backpack(BatchGrad(), BatchL2Grad(), check="always"):
        lossfunc(logits, target).backward()
    owners, rows = _owners(pick), model(inputs)
    terms = nn.functional.cross_entropy(rows, target, reduction="none") / len(target)
    for n in range(N):
        total = terms[owners == n].sum()
        own = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
        for parameter, expected in zip(model.parameters(), own, strict=True):
            found = vars(parameter)
            torch.testing.assert_close(found["grad_batch"][n], expected)
            torch.testing.assert_close(found["batch_l2"][n], expected.square().sum())


@pytest.mark.parametrize("way", PICKED)
@pytest.mark.parametrize("shape", SHAPES)
def test_curvature(way: str, shape: str) -> None:
    pick, inputs = PICKED[way], torch.randn(N, T, 2)
    model = _net(SHAPES[shape], pick)
    logits = extend(model)(inputs)
    loss = extend(nn.CrossEntropyLoss())(logits, torch.randint(0, C, (len(logits),)))
    with backpack(DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact(), check="always"):
        loss.backward()
    owners, rows = _owners(pick), model(inputs)
    for parameter in model.parameters():
        expected = torch.zeros(N, *parameter.shape)
        for owner, row in zip(owners.long(), rows, strict=True):
            p = row.softmax(0).detach()
            jacobian = torch.stack(
                [torch.autograd.grad(z, parameter, retain_graph=True)[0] for z in row]
            ).flatten(1)
            hessian = (p.diag() - p.outer(p)) / len(rows)
            diagonal = torch.einsum("ij,ik,kj->j", jacobian, hessian, jacobian)
            expected[owner] += diagonal.view_as(parameter)
        found = vars(parameter)
        torch.testing.assert_close(found["diag_ggn_exact_batch"], expected)
        torch.testing.assert_close(found["diag_ggn_exact"], expected.sum(0))
        torch.testing.assert_close(found["sqrt_ggn_exact"].square().sum(0), expected)


def test_factors_of_a_head_are_those_of_the_entries() -> None:
    """One position of each sample: as for the tensor of these."""
    model, inputs = nn.Linear(2, C), torch.randn(N, T, 2)
    last = torch.tensor([5, 2, 0, 3])
    loss, found = extend(nn.CrossEntropyLoss()), []
    for picked in (inputs[torch.arange(N), last], inputs):
        logits = extend(model)(picked)
        logits = logits[torch.arange(N), last] if picked is inputs else logits
        with backpack(KFLR()):
            loss(logits, torch.arange(N) % C).backward()
        found.append(vars(model.bias)["kflr"])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("way", [way for way in PICKED if way != "one"])
@pytest.mark.parametrize("shape", ["direct", "head"])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_what_mixes_behind(way: str, shape: str, extension: Any) -> None:
    model = extend(_net(SHAPES[shape], PICKED[way]))
    z = model(torch.randn(N, T, 2))
    loss = extend(nn.CrossEntropyLoss())(z @ z.T, torch.arange(len(z)))
    with pytest.raises(SampleMixingError), backpack(extension()):
        loss.backward()


def test_merged_entries_that_mix() -> None:
    model = extend(nn.Linear(2, C))
    z = model(torch.randn(N, T, 2)).flatten(0, 1)
    loss = extend(nn.CrossEntropyLoss())(z @ z.T, torch.arange(len(z)))
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chosen", [[3, 1], [1, 1]])
def test_a_subset_of_samples(shape: str, chosen: list[int]) -> None:
    model = _net(SHAPES[shape], PICKED["masked"])
    logits, found = extend(model)(torch.randn(N, T, 2)), []
    loss = nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    for subsampling in (None, chosen):
        with backpack(BatchGrad(subsampling=subsampling)):
            loss.backward(retain_graph=True)
        found.append([vars(p)["grad_batch"] for p in model.parameters()])
    for every, some in zip(*found, strict=True):
        torch.testing.assert_close(some, every[chosen])


LOOKED_UP: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "leaf": lambda table, which: table[which],
    "part of a leaf": lambda table, which: table[:-1][which],
    "computed": lambda table, which: table.sin()[which],
    "function": lambda table, which: nn.functional.embedding(which, table * 2),
}


@pytest.mark.parametrize("is_extended", [True, False])
@pytest.mark.parametrize("way", LOOKED_UP)
@pytest.mark.parametrize("rows", [N, 2 * N, N + 1])
def test_a_table_is_no_batch(rows: int, way: str, is_extended: bool) -> None:
    """What is picked from a parameter is no sample's, also where it has as many rows."""
    which = torch.tensor([rows - 2, 0, 0, 2])

    def forward(net: Any, x: Tensor) -> Tensor:
        return LOOKED_UP[way](net.c.weight, which) + net.a(x)  # type: ignore[no-any-return]

    model = extend(Net(forward, a=nn.Linear(2, C), c=nn.Linear(C, rows, bias=False)))
    x, target = torch.randn(N, 2), torch.randint(0, C, (N,))
    terms = nn.functional.cross_entropy(model(x), target, reduction="none") / N
    lossfunc = extend(nn.CrossEntropyLoss()) if is_extended else nn.functional.cross_entropy
    loss = lossfunc(model(x), target)
    with backpack(BatchGrad()):
        loss.backward()
    for n in range(N):
        own = torch.autograd.grad(terms[n], list(model.parameters()), retain_graph=True)
        for parameter, expected in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(vars(parameter)["grad_batch"][n], expected)
