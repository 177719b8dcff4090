"""Columns that go through the net in chunks, where a rule hands over to autograd's own node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core.extensions import KFLR, BatchDiagGGNExact, DiagGGNExact, SqrtGGNExact
from backpack_products.tuning import memory_budget, set_memory_budget
from tests import oracle
from tests.cases import Net, Problem, classification


def images(activation: nn.Module) -> nn.Sequential:
    """Two convolutions; the first layer's output is overwritten by the activation."""
    first, second = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2)
    return nn.Sequential(first, activation, second, nn.Flatten(), nn.Linear(2, 3))


def _branches() -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.a(x)
        return net.c(net.silu(net.b(hidden)) + net.mish(net.d(hidden)))  # type: ignore[no-any-return]

    parts = {name: nn.Linear(4 if name in "bd" else 3, 4) for name in "abd"}
    activations = {"silu": nn.SiLU(inplace=True), "mish": nn.Mish(inplace=True)}
    return Net(forward, **parts, **activations, c=nn.Linear(4, 3))


def _twice() -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(net.silu(net.a(net.silu(net.a(x)))))  # type: ignore[no-any-return]

    return Net(forward, a=nn.Linear(3, 3), silu=nn.SiLU(inplace=True), c=nn.Linear(3, 3))


def _functional() -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = F.silu(net.a(x) * 2, inplace=True)
        return net.c(net.mish(net.b(hidden)).sigmoid_())  # type: ignore[no-any-return]

    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 3)}
    return Net(forward, **parts, mish=nn.Mish(inplace=True))


def _dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


def _dropped_channels() -> nn.Sequential:
    """Whole channels are zero before they meet the mask."""
    layers = [nn.Conv2d(2, 6, 2), nn.ReLU(), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(24, 3)]
    layers[0].bias.data[:3] = -9.0
    return nn.Sequential(*layers)


Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
CASES: dict[str, Case] = {
    "dropout": (_dropout, (3,)),
    "dropped_channels": (_dropped_channels, (2, 3, 3)),
    "silu": (lambda: images(nn.SiLU(inplace=True)), (2, 3, 3)),
    "mish": (lambda: images(nn.Mish(inplace=True)), (2, 3, 3)),
    "hardswish": (lambda: images(nn.Hardswish(inplace=True)), (2, 3, 3)),
    "hardsigmoid": (lambda: images(nn.Hardsigmoid(inplace=True)), (2, 3, 3)),
    "threshold": (lambda: images(nn.Threshold(0.1, 0.2, inplace=True)), (2, 3, 3)),
    "relu": (lambda: images(nn.ReLU(inplace=True)), (2, 3, 3)),
    "elu": (lambda: images(nn.ELU(inplace=True)), (2, 3, 3)),
    "branches": (_branches, (3,)),
    "twice": (_twice, (3,)),
    "functional": (_functional, (3,)),
}


def make(name: str, batch: int = 3, reduction: str = "mean") -> Problem:
    """A problem by the name of its net, in train mode."""
    net, shape = CASES[name]
    problem = classification(net(), shape, batch, reduction=reduction)
    problem.whole = "drop" in name
    return problem


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Room for one column at a time."""
    before = memory_budget()
    set_memory_budget(1)
    yield
    set_memory_budget(before)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_diagonal(name: str, chunk_size: int) -> None:
    problem = make(name)
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(DiagGGNExact(chunk_size=chunk_size))
    problem.compare("diag_ggn_exact", expected)


@pytest.mark.parametrize("name", ["dropout", "silu", "branches"])
@pytest.mark.parametrize(("batch", "reduction"), [(1, "sum"), (3, "mean")])
@pytest.mark.usefixtures("little_memory")
def test_chunks_made_by_the_memory_budget(name: str, batch: int, reduction: str) -> None:
    problem = make(name, batch, reduction)
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(DiagGGNExact())
    problem.compare("diag_ggn_exact", expected)


@pytest.mark.parametrize("chunk_size", [1, None])
@pytest.mark.parametrize("name", ["dropout", "silu", "twice"])
def test_other_quantities(name: str, chunk_size: int | None) -> None:
    problem = make(name)
    samples = problem.expected(oracle.ggn_diagonals)
    blocks = [block.sum(0) for block in problem.expected(oracle.ggn)]
    problem.run(BatchDiagGGNExact(chunk_size=chunk_size), SqrtGGNExact(chunk_size=chunk_size))
    problem.compare("diag_ggn_exact_batch", samples)
    for root, block in zip(problem.fields("sqrt_ggn_exact"), blocks, strict=True):
        rows = root.flatten(2).flatten(0, 1)
        oracle.assert_close(rows.T @ rows, block)


@pytest.mark.parametrize("chunk_size", [1, None])
@pytest.mark.parametrize("name", ["dropout", "functional"])
def test_kronecker_factors_of_one_sample(name: str, chunk_size: int | None) -> None:
    """For one sample and one position they are the block."""
    problem = make(name, 1)
    blocks = [block.sum(0) for block in problem.expected(oracle.ggn)]
    problem.run(KFLR(chunk_size=chunk_size))
    for factors, block in zip(problem.fields("kflr"), blocks, strict=True):
        whole = factors[0] if len(factors) == 1 else torch.kron(factors[0], factors[1])
        oracle.assert_close(whole, block)
