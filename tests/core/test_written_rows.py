"""Rows that are written among others: into zeros or a table, by experts, and by a state."""

from __future__ import annotations

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
from tests.cases import Net

N, T, D, C = 3, 2, 4, 3
WRITE: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "index_add": lambda net, h, k: torch.zeros_like(h).index_add(0, torch.tensor([k]), h[[k]]),
    "index_copy": lambda net, h, k: torch.zeros_like(h).index_copy(0, torch.tensor([k]), h[[k]]),
    "index_put": lambda net, h, k: torch.zeros_like(h).index_put((torch.tensor([k]),), h[[k]]),
    "masked_scatter": lambda net, h, k: torch.zeros_like(h).masked_scatter(_mask(k), h[k]),
    "where": lambda net, h, k: torch.where(_mask(k), h[k], torch.ones(())),
    "cat": lambda net, h, k: torch.cat(
        [torch.zeros(k, T, D), h[k : k + 1], torch.ones(N - k - 1, T, D)]
    ),
    "pad": lambda net, h, k: F.pad(h[k : k + 1], (0, 0, 0, 0, k, N - k - 1)),
    "padded and cut": lambda net, h, k: F.pad(
        _put(torch.zeros_like(h), k, h[k]), (0, 0, 0, 0, 1, 1)
    )[1:-1],
    "joined and cut": lambda net, h, k: torch.cat(
        [_put(torch.zeros_like(h), k, h[k]), torch.ones(1, T, D)]
    )[:-1],
    "in place": lambda net, h, k: _put(torch.zeros_like(h), k, h[k]),
    "a token": lambda net, h, k: _put(torch.zeros_like(h), (k, 1), h[k, 1]),
    "into a table": lambda net, h, k: _put(net.table.expand(N, T, D), k, h[k]),
    "merged": lambda net, h, k: (
        torch.zeros(N * T, D).index_add(0, torch.arange(k * T, k * T + T), h[k]).view_as(h)
    ),
}


def _mask(k: int) -> Tensor:
    return (torch.arange(N) == k)[:, None, None].expand(N, T, D)


def _put(out: Tensor, key: Any, rows: Tensor) -> Tensor:
    out = out.clone()
    out[key] = rows
    return out


def _check(model: nn.Module, loss: Callable[[Tensor], Tensor], given: Any, **options: Any) -> None:
    """Against the gradients of the rows of the output, each of which is of one sample."""
    parameters, out = [*model.parameters()], model(*given)
    asked: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    single = [torch.autograd.grad(loss(row[None]), parameters, **asked) for row in out]
    value = loss(extend(model)(*given))
    with backpack(BatchGrad(), **options):
        value.backward()
    for parameter, *own in zip(parameters, *single, strict=True):
        found = getattr(parameter, "grad_batch", torch.zeros(len(out), *parameter.shape))
        oracle.assert_close(found, torch.stack(own))


@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("k", range(N))
@pytest.mark.parametrize("name", WRITE)
def test_rows_of_one_sample_among_rows_of_nobody(name: str, k: int, check: Any) -> None:
    model = Net(
        lambda net, x: net.o(torch.tanh(WRITE[name](net, torch.tanh(net.a(x)), k))),
        a=nn.Linear(D, D),
        o=nn.Linear(D, C),
    )
    model.table = nn.Parameter(torch.randn(T, D))
    _check(model, lambda out: out.square().sum(), [torch.randn(N, T, D)], check=check)


@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_padding_of_a_sample_alone(length: int) -> None:
    """Rows of one sample, as long as the batch or a multiple: all of them are its own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        steps = [F.pad(h[:1], (0, 0, 0, length - 1)) for h in net.a(x)]
        return torch.stack([net.o(h).tanh().mean(0) for h in steps])

    model = Net(forward, a=nn.Linear(D, D), o=nn.Linear(D, C))
    _check(model, lambda out: out.square().sum(), [torch.randn(N, T, D)])


class Activation(nn.Module):
    """One without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


PICKS = [
    [[1, 3], [0], [2]],
    [[0], [1, 3], [2]],
    [[2, 0], [1, 3], []],
    [[3, 1], [0], [2]],
    [[0, 1, 2, 3], [], []],
]


@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("act", [Activation(), nn.Tanh(), torch.tanh])
def test_experts_whose_picks_change(act: Any, check: Any) -> None:
    def forward(net: Any, x: Tensor, picks: list[list[int]]) -> Tensor:
        tokens = net.a(x).flatten(0, 1)
        out = torch.zeros_like(tokens)
        for expert, rows in zip((net.b, net.c, net.d), picks, strict=True):
            if rows:
                out = out.index_add(0, torch.tensor(rows), act(expert(tokens[rows])))
        return net.o(out.view(2, 2, D))  # type: ignore[no-any-return]

    parts = {name: nn.Linear(D, D) for name in "abcdo"}
    model = Net(forward, **parts, act=act) if isinstance(act, nn.Module) else Net(forward, **parts)
    for picks in PICKS * 2:
        for parameter in model.parameters():
            parameter.__dict__.clear()
        _check(model, lambda out: out.square().sum(), [torch.randn(2, 2, D), picks], check=check)


STATES: dict[str, Callable[[Any, Tensor, int, Tensor], Tensor]] = {
    "slice": lambda net, x, n, h: 0.5 * h + torch.tanh(net.a(x[n : n + 1])),
    "row": lambda net, x, n, h: 0.5 * h + torch.tanh(net.a(x[n]))[None],
    "cell": lambda net, x, n, h: net.cell(x[n : n + 1], h),
    "none": lambda net, x, n, h: torch.tanh(net.a(x[n : n + 1])),
}


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("name", STATES)
def test_a_state_that_goes_from_sample_to_sample(name: str, is_module: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h, out = torch.zeros(1, D), []
        for n in range(len(x)):
            h = STATES[name](net, x, n, h)
            out.append(net.o(h))
        return torch.cat(out)

    model = Net(forward, a=nn.Linear(D, D), o=nn.Linear(D, C), cell=nn.GRUCell(D, D))
    x = torch.randn(5, D)
    if name == "none":
        _check(model, lambda out: out.square().sum(), [x])
        return
    lossfunc = extend(nn.CrossEntropyLoss()) if is_module else F.cross_entropy
    value = lossfunc(extend(model)(x), torch.arange(5) % C)
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        value.backward()


@pytest.mark.parametrize("others", [[1], [0, 1], [1, 1, 2], [0, 0, 0, 1]])
@pytest.mark.parametrize("k", range(N))
@pytest.mark.parametrize("name", [name for name in WRITE if name != "a token"])
def test_rows_of_nobody_that_are_picked(name: str, k: int, others: list[int]) -> None:
    """They may belong to the samples of their places, so not to the one that the others are of."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.o(torch.tanh(WRITE[name](net, torch.tanh(net.a(x)), k)))  # type: ignore[no-any-return]

    model: Any = Net(forward, a=nn.Linear(D, D), o=nn.Linear(D, C))
    model.table = nn.Parameter(torch.randn(T, D))
    x, picks = torch.randn(N, T, D), [(k + other) % N for other in others]
    terms, bias = model(x).square().flatten(1).sum(1), model.o.bias
    own = [torch.autograd.grad(term, bias, retain_graph=True)[0] for term in terms]
    expected = torch.stack([own[n] * picks.count(n) for n in range(N)])
    picked = extend(model)(x)[picks]
    value = extend(nn.MSELoss(reduction="sum"))(picked, torch.zeros_like(picked))
    try:
        with backpack(BatchGrad()):
            value.backward()
    except (SampleMixingError, ShapeError):
        return  # whose they are is not known: they may be padding of the other's sample
    oracle.assert_close(model.o.bias.grad_batch, expected)
