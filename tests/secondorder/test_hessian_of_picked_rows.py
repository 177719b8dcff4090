"""The Hessian at plain functions of picked rows: as many as samples, all of one, or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDiagHessian, DiagHessian
from tests import oracle
from tests.cases import Net

N, T, D = 3, 2, 2
Function = Callable[[Tensor], Tensor]


class Sine(nn.Module):
    """An activation without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def _of_items(net: Any, items: Sequence[Tensor], act: Function) -> Tensor:
    return torch.stack([act(net.a(item)).mean(0) for item in items])


def _routed(rows: list[int]) -> Callable[[Any, Tensor, Function], Tensor]:
    def forward(net: Any, x: Tensor, act: Function) -> Tensor:
        tokens = net.a(x).flatten(0, 1)
        chosen = torch.tensor([row for row in rows if row < len(tokens)])
        found = torch.zeros_like(tokens).index_add(0, chosen, act(net.b(tokens[chosen])))
        return found.view_as(x)

    return forward


Forward = Callable[[Any, Any, Function], Tensor]
MODELS: dict[str, Forward] = {
    "items": _of_items,
    "as many of two": _routed([0, 2, 3]),
    "in another order": _routed([5, 0, 2]),
    "fewer": _routed([4, 1]),
    "twice as many": _routed([0, 1, 5, 4, 2, 3]),
    "in order": _routed([0, 2, 4]),
}
ACTS: dict[str, Function] = {
    "function": torch.tanh,
    "module": Sine(),
    "product": lambda x: x * x.sin(),
    "softmax": lambda x: x.softmax(1),
}
SIZES = [(1, 3, 2), (3, 3, 3), (3, 1, 6), (2, 2, 4)]


def _check(forward: Forward, act: Function, x: Any) -> None:
    def run(net: Any, given: Any) -> Tensor:
        return forward(net, given, act)

    model: Any = Net(run, a=nn.Linear(D, D), b=nn.Linear(D, D))
    weight, expected = model.a.weight.detach(), []
    for n in range(N):

        def loss(weight: Tensor, n: int = n) -> Tensor:
            value: Tensor = functional_call(model, {"a.weight": weight}, (x,))
            return value[n].square().sum()

        hessian = torch.autograd.functional.hessian(loss, weight).view(D * D, D * D)
        expected.append(hessian.diag().view(D, D))
    if isinstance(act, nn.Module):
        model.act = act
    z = extend(model)(x)
    value = extend(nn.MSELoss(reduction="sum"))(z, torch.zeros_like(z))
    with backpack(DiagHessian(), BatchDiagHessian()):
        value.backward()
    oracle.assert_close(model.a.weight.diag_h_batch, torch.stack(expected))
    oracle.assert_close(model.a.weight.diag_h, torch.stack(expected).sum(0))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_items(sizes: tuple[int, ...], act: str) -> None:
    _check(MODELS["items"], ACTS[act], [torch.randn(size, D) for size in sizes])


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "items"])
def test_rows_that_are_handed_out(name: str, act: str) -> None:
    _check(MODELS[name], ACTS[act], torch.randn(N, T, D))
