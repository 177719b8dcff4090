"""The diagonal of the Hessian where a tensor has no samples on axis 0: tables, for example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core.errors import BackpackWarning, BridgeError, UnsupportedError
from backpack_core.extensions import BatchDiagHessian, DiagHessian
from tests.cases import Net, Problem
from tests.oracle import assert_close
from tests.secondorder.problems import hessians
from tests.secondorder.test_diag_hessian import diagonals

N, T, D = 3, 4, 3
Forward = Callable[[Any, Tensor], Tensor]


def _net(function: Forward, **parts: Any) -> Net:
    """``last(tanh(function))``, averaged over positions; ``first`` comes before."""
    return Net(
        lambda net, x: net.last(torch.tanh(function(net, x)).mean(1)),
        first=nn.Linear(D, D), last=nn.Linear(D, D), **parts,
    )  # fmt: skip


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def _hidden(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.first(x))


EXACT: dict[str, Callable[[], Net]] = {
    "positions": lambda: _net(
        lambda net, x: net.first(x) + net.table(torch.arange(T)), table=nn.Embedding(T, D)
    ),
    "a row of positions": lambda: _net(
        lambda net, x: net.first(x) + net.table(torch.arange(T)[None]), table=nn.Embedding(T, D)
    ),
    "positions twice": lambda: _net(
        lambda net, x: net.second(_hidden(net, x) + net.table(torch.arange(T)))
        + net.table(torch.arange(T)),
        table=nn.Embedding(T, D), second=nn.Linear(D, D),
    ),
    "by module and function": lambda: _net(
        lambda net, x: net.first(x) + net.table(torch.arange(T)) + net.table.weight.flip(0),
        table=nn.Embedding(T, D),
    ),
    "projected table": lambda: _net(
        lambda net, x: net.first(x) + net.first(net.table(torch.arange(T))),
        table=nn.Embedding(T, D),
    ),
    "class token": lambda: _net(
        lambda net, x: net.second(torch.cat([net.token.expand(len(x), 1, D), net.first(x)], 1)),
        token=_weight(D), second=nn.Linear(D, D),
    ),
    "gain": lambda: _net(
        lambda net, x: net.second(net.gain[None] * _hidden(net, x)),
        gain=_weight(D), second=nn.Linear(D, D),
    ),
    "F.linear": lambda: _net(lambda net, x: F.linear(_hidden(net, x), net.w), w=_weight(D, D)),
    "low rank": lambda: _net(
        lambda net, x: _hidden(net, x) @ (net.a @ net.b), a=_weight(D, 2), b=_weight(2, D)
    ),
    "tied": lambda: _net(
        lambda net, x: net.first(x) + F.linear(x.flip(1), net.first.weight)
    ),
    "added product": lambda: _net(
        lambda net, x: torch.addcmul(net.b, _hidden(net, x), net.gain),
        b=_weight(D), gain=_weight(D),
    ),
    "look-up": lambda: _net(
        lambda net, x: net.first(x) * F.embedding((x[..., 0] > 0).long(), net.w), w=_weight(2, D)
    ),
    "steps first": lambda: _net(lambda net, x: net.first(x.transpose(0, 1)).transpose(0, 1)),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[], Net], str]] = {
    "exponential": (
        lambda: _net(lambda net, x: net.w.exp() * net.first(x), w=_weight(D)), "it is nonlinear"
    ),
    "quotient": (lambda: _net(lambda net, x: net.first(x) / net.w, w=_weight(D)), "nonlinear"),
    "square": (lambda: _net(lambda net, x: net.w * net.w * net.first(x), w=_weight(D)), "one p"),
    "one after the other": (
        lambda: _net(lambda net, x: net.w * (net.w * net.first(x)), w=_weight(D)), "one parameter"
    ),
    "tied": (
        lambda: _net(lambda net, x: F.linear(_hidden(net, x), net.first.weight)), "one parameter"
    ),
    "function before its module": (
        lambda: _net(
            lambda net, x: net.second(torch.tanh(net.first(x) + net.second.weight[:1])),
            second=nn.Linear(D, D),
        ),
        "used again",
    ),
    "normalised table": (
        lambda: _net(
            lambda net, x: net.first(x) + net.norm(net.table(torch.arange(T))),
            table=nn.Embedding(T, D), norm=nn.LayerNorm(D),
        ),
        "since it is nonlinear",
    ),
}  # fmt: skip


def _both(net: Any, x: Tensor) -> Tensor:
    """Two parts of each sample, one behind the other on axis 0."""
    first, second = torch.tanh(net.first(torch.cat([x[:, :2], x[:, 2:]]))).chunk(2)
    return (first - second).square() + first * second


def _rewritten(net: Any, x: Tensor) -> Tensor:
    """A view of what a layer made of merged rows is overwritten."""
    h = net.first(x.flatten(0, 1))
    h.view(x.shape)[..., :2].tanh_()
    return h.view(x.shape)


# The gradient of a single sample is the one that autograd has.
OF_ONE = EXACT | {
    "two parts": lambda: _net(_both),
    "computed table": lambda: _net(
        lambda net, x: net.first(x) + torch.tanh(net.table(torch.arange(T)) @ net.w),
        table=nn.Embedding(T, D), w=_weight(D, D),
    ),
    "function of a view": lambda: _net(
        lambda net, x: net.first(x) / net.w.flip(0).exp(), w=_weight(D)
    ),
    "layer by a function": lambda: _net(
        lambda net, x: F.linear(_hidden(net, x), net.first.weight)
    ),
    "rewritten": lambda: _net(_rewritten),
}  # fmt: skip


def _problem(net: Net, batch: int = N) -> Problem:
    data = torch.randn(batch, T, D)
    return Problem(net, (data,), nn.CrossEntropyLoss(), torch.randint(D, (batch,)))


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, size: int | None) -> None:
    problem = _problem(EXACT[name]())
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(DiagHessian(chunk_size=size), BatchDiagHessian(chunk_size=size))
    problem.compare("diag_h", [d.sum(0) for d in expected])
    problem.compare("diag_h_batch", expected)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("name", OF_ONE)
def test_exact_for_one_sample(name: str, size: int | None) -> None:
    problem = _problem(OF_ONE[name](), 1)
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    again = BatchDiagHessian([0, 0, -1], savefield="again")
    problem.run(DiagHessian(chunk_size=size), BatchDiagHessian(chunk_size=size), again)
    problem.compare("diag_h", [d.sum(0) for d in expected])
    problem.compare("diag_h_batch", expected)
    problem.compare("again", [d[[0, 0, 0]] for d in expected])


@pytest.mark.parametrize("name", ["exponential", "quotient", "square", "one after the other"])
def test_what_enters_nonlinearly_in_one_sample(name: str) -> None:
    """A leaf itself is a constant where an operation is differentiated."""
    make, match = REFUSED[name]
    with pytest.raises(BridgeError, match=match):
        _problem(make(), 1).run(DiagHessian())


@pytest.mark.parametrize("name", ["positions", "gain", "F.linear"])
def test_some_samples(name: str) -> None:
    problem = _problem(EXACT[name]())
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(BatchDiagHessian(subsampling=[2, 0, 2]))
    problem.compare("diag_h_batch", [d[[2, 0, 2]] for d in expected])


@pytest.mark.parametrize("name", REFUSED)
def test_what_enters_nonlinearly(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises((BridgeError, UnsupportedError), match=match):
        _problem(make()).run(DiagHessian())


class Flat(nn.Module):
    """A loss of ``[N * T, C]``."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _tokens(x: Tensor) -> Problem:
    net = Net(lambda net, x: net.b(torch.tanh(net.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, D))
    return Problem(net, (x,), Flat(), torch.randint(D, x.shape[:2]))


def test_a_loss_of_merged_positions() -> None:
    from backpack_core import backpack, extend

    problem = _tokens(torch.randn(N, T, D))
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    lossfunc = extend(nn.CrossEntropyLoss())
    extend(problem.model)
    loss = lossfunc(problem.model(*problem.inputs).flatten(0, 1), problem.target.flatten())
    with backpack(BatchDiagHessian()):
        loss.backward()
    problem.compare("diag_h_batch", expected)
    loss = -lossfunc(problem.model(*problem.inputs).flatten(0, 1), problem.target.flatten())
    with backpack(BatchDiagHessian()):
        loss.backward()
    problem.compare("diag_h_batch", [-diagonal for diagonal in expected])


LEFT_OUT = {
    "exponential": {"w"},
    "quotient": {"w"},
    "square": {"w"},
    "one after the other": {"w"},
    "tied": {"first.weight"},
    "function before its module": {"second.weight"},
    "normalised table": {"table.weight"},
}


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("chosen", [None, [2, 0, 2]])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_out(name: str, chosen: list[int] | None, size: int | None) -> None:
    """With ``fail_mode="warning"``, the others are exact."""
    problem = _problem(REFUSED[name][0]())
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    with pytest.warns(BackpackWarning, match=REFUSED[name][1]):
        problem.run(
            DiagHessian(chosen, fail_mode="warning", chunk_size=size),
            BatchDiagHessian(chosen, fail_mode="warning", chunk_size=size),
        )
    named = dict(zip(problem.parameters, expected, strict=True))
    for path, parameter in problem.model.named_parameters():
        if path in LEFT_OUT[name]:
            assert not hasattr(parameter, "diag_h")
            assert not hasattr(parameter, "diag_h_batch")
            continue
        right = named[parameter] if chosen is None else named[parameter][chosen]
        assert_close(parameter.diag_h_batch, right)  # type: ignore[attr-defined]
        assert_close(parameter.diag_h, right.sum(0))  # type: ignore[attr-defined]
