"""The diagonal of the Hessian by products, against differentiating twice, entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError, UsageError
from backpack_core.extensions import HMP, DiagHessian, DiagHMP
from tests import oracle
from tests.cases import Net
from tests.secondorder.problems import NETS, SETTINGS, hessians, make


@pytest.mark.parametrize(("batch", "reduction", "loss"), SETTINGS[1:])
@pytest.mark.parametrize("net", NETS)
def test_exact(net: str, batch: int, reduction: str, loss: str) -> None:
    problem = make(net, batch, reduction, loss)
    blocks = problem.expected(hessians)
    problem.run(DiagHMP(chunk_size=3))
    for p, block in zip(problem.parameters, blocks, strict=True):
        oracle.assert_close(p.diag_hmp, block.sum(0).diagonal().reshape(p.shape))  # type: ignore[attr-defined]


def _attention(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).unflatten(1, (3, 2))
    with sdpa_kernel(SDPBackend.MATH):  # the oracle needs it
        return F.scaled_dot_product_attention(h, h, h).flatten(1)


def _recurrent(net: Any, x: Tensor) -> Tensor:
    h = net.start.expand(len(x), -1)
    for _ in range(3):
        h = net.cell(x, h)
    return h  # type: ignore[no-any-return]


# Nets that differentiating twice takes as they are; DiagHessian refuses some.
ANY: dict[str, Callable[..., Tensor]] = {
    "functional attention": _attention,
    "a start that is trained": _recurrent,
    "a number inside a sine": lambda net, x: torch.sin(net.slope * net.a(x)),
    "gated": lambda net, x: net.a(x) * torch.sigmoid(net.b(x)),
    "samples that influence each other": lambda net, x: net.norm(net.a(x)),
}


@pytest.mark.parametrize("name", ANY)
def test_any_architecture(name: str) -> None:
    net = Net(
        lambda net, x: ANY[name](net, x).flatten(1),
        a=nn.Linear(3, 6),
        b=nn.Linear(3, 6),
        cell=nn.GRUCell(3, 2),
        norm=nn.BatchNorm1d(6),
        start=nn.Parameter(torch.randn(2)),
        slope=nn.Parameter(torch.tensor(0.7)),
    )
    x = torch.randn(4, 3)

    def loss() -> Tensor:
        return extend(net)(x).pow(3).mean()  # type: ignore[no-any-return]

    with backpack(DiagHMP()):
        loss().backward()
    for parameter in net.parameters():
        expected = _diagonal(loss(), parameter)
        if expected.any():
            oracle.assert_close(parameter.diag_hmp, expected)  # type: ignore[attr-defined]


def _diagonal(loss: Tensor, parameter: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(loss, parameter, create_graph=True, materialize_grads=True)
    if not slope.requires_grad:
        return torch.zeros_like(slope)
    rows = [
        torch.autograd.grad(entry, parameter, retain_graph=True, materialize_grads=True)[0]
        for entry in slope.flatten()
    ]
    return torch.stack([row.flatten()[i] for i, row in enumerate(rows)]).reshape(parameter.shape)


def test_a_vmap_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.autograd.grad

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = grad(*args, **kwargs)
        return (found[0] * 1.01,) if kwargs.get("is_grads_batched") else found

    monkeypatch.setattr(torch.autograd, "grad", wrong)
    test_any_architecture("gated")


def test_chosen_samples() -> None:
    net, lossfunc = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh())), extend(nn.MSELoss())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with backpack(DiagHMP(subsampling=[2, 0])):
        lossfunc(net(x), y).backward()
    expected = _diagonal(lossfunc(net(x[[2, 0]]), y[[2, 0]]) / 2, net[0].weight)
    oracle.assert_close(net[0].weight.diag_hmp, expected)


def test_products_of_chosen_samples_without_gradients() -> None:
    net, lossfunc = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh())), extend(nn.MSELoss())
    with backpack(HMP(subsampling=[1])):
        lossfunc(net(torch.randn(4, 3)), torch.randn(4, 2)).backward()
    multiply, vector = net[0].weight.hmp, torch.randn(2, 3)
    expected = multiply(vector)
    with torch.no_grad():
        oracle.assert_close(multiply(vector), expected)


def test_chunks_are_positive() -> None:
    with pytest.raises(UsageError, match="chunk_size must be positive"):
        DiagHMP(chunk_size=0)


def test_the_rules_name_it() -> None:
    parts = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2), "bilinear": nn.Bilinear(2, 2, 2)}
    net = extend(Net(lambda net, x: net.bilinear(net.a(x), net.b(x)), **parts))
    loss = extend(nn.MSELoss())(net(torch.randn(4, 3)), torch.zeros(4, 2))
    with pytest.raises(BackpackError, match="DiagHMP"), backpack(DiagHessian()):
        loss.backward()
