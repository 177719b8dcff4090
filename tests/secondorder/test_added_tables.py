"""Kronecker factors of tables that are added to all samples: those of look-ups of every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    SqrtGGNExact,
)
from tests.cases import Net
from tests.oracle import assert_close

Forward = Callable[[Any, Tensor, Callable[..., Tensor]], Any]
NUM, DIM, STEPS = 6, 3, 4


def _added(net: Any, x: Tensor, rows: Callable[..., Tensor]) -> Any:
    return net.head(torch.tanh(x + rows(range(STEPS))).mean(1))


def _behind_a_token(net: Any, x: Tensor, rows: Callable[..., Tensor]) -> Any:
    """Rows are prepended to each sample."""
    token = rows(range(2)).expand(len(x), 2, DIM)
    return net.head(torch.tanh(net.inner(torch.cat([token, x], 1))).mean(1))


def _twice(net: Any, x: Tensor, rows: Callable[..., Tensor]) -> Any:
    h = torch.tanh(net.inner(x - rows(range(STEPS))))
    return net.head(torch.tanh(h + rows(range(STEPS))).mean(1))


# How a table of some shape gives rows: numbers of rows, and the table, to a tensor.
TABLES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, int], Tensor]]] = {
    "rows": ((NUM, DIM), lambda table, count: table[:count]),
    "with samples in front": ((1, NUM, DIM), lambda table, count: table[:, :count]),
    "turned": ((1, NUM, DIM), lambda table, count: table[0, :count].unsqueeze(0)),
    "picked": ((2, 1, NUM // 2, DIM), lambda table, count: table.view(1, NUM, DIM)[:, :count]),
}


def make(forward: Forward, shape: tuple[int, ...] | None, rows: Any) -> nn.Module:
    """A net with a table, which is looked up where there is no shape."""
    torch.manual_seed(0)
    parts = {"inner": nn.Linear(DIM, DIM), "head": nn.Linear(DIM, 3)}
    values = torch.randn(NUM, DIM)
    if shape is None:
        table = nn.Embedding(NUM, DIM)
        table.weight.data = values
        look_up: Any = lambda net: lambda numbers: net.table(torch.tensor([[*numbers]]))  # noqa: E731
        return Net(lambda net, x: forward(net, x, look_up(net)), table=table, **parts)
    take: Any = lambda net: lambda numbers: rows(net.table, len(numbers))  # noqa: E731
    net = Net(lambda net, x: forward(net, x, take(net)), **parts)
    net.table = nn.Parameter(values.reshape(shape))
    return net


def run(net: nn.Module, *extensions: Any) -> list[Any]:
    """What is stored on the table."""
    x, y = torch.randn(5, STEPS, DIM, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    torch.manual_seed(2)
    with backpack(*extensions):
        extend(nn.CrossEntropyLoss())(extend(net)(x), y % 3).backward()
    table: Any = net.table
    return [getattr(getattr(table, "weight", table), each.savefield) for each in extensions]


@pytest.mark.parametrize("table", [None, *TABLES])
def test_eigenvalues_in_a_basis_of_means(table: str | None) -> None:
    """The input factor of means over positions has vectors; eigenvalues are the exact diagonal."""
    shape, rows = (None, None) if table is None else TABLES[table]
    basis, root = run(make(_added, shape, rows), EKFAC(None, "reduce"), SqrtGGNExact())
    assert all(vectors is not None for vectors in basis.vectors)
    turned = basis.rotate(root.flatten(0, 1)).square().sum(0)
    assert_close(basis.values.flatten(), turned.flatten())


@pytest.mark.parametrize("forward", [_added, _behind_a_token, _twice])
@pytest.mark.parametrize("table", TABLES)
def test_as_looked_up(forward: Forward, table: str) -> None:
    shape, rows = TABLES[table]
    matrices = (
        KFLR("expand"), KFLR(chunk_size=1, savefield="chunks"), KFAC(2), EKFAC(None),
    )  # fmt: skip
    extensions = (BatchGrad(), BatchL2Grad(), DiagGGNExact(), *matrices)
    ours = run(make(forward, shape, rows), *extensions)
    looked_up = run(make(forward, None, None), *extensions)
    for mine, expected in zip(ours[:3], looked_up[:3], strict=True):
        assert_close(mine.flatten(), expected.flatten())
    vectors = torch.randn(2, *shape)
    for mine, expected in zip(ours[3:], looked_up[3:], strict=True):
        assert mine.order.shape == shape
        assert_close(mine.dense(), expected.dense())
        assert_close(mine.matmul(vectors).flatten(1), vectors.flatten(1) @ expected.dense())


def test_formula() -> None:
    diagonal, expanded, reduced = run(
        make(_added, *TABLES["rows"]), DiagGGNExact(), KFLR("expand"), KFLR("reduce", savefield="r")
    )
    used = (torch.arange(NUM) < STEPS).double() / STEPS
    assert_close(expanded[1], used)
    assert_close(expanded.trace(), diagonal.sum())
    assert_close(reduced[1], torch.outer(used, used))


def _resized(net: Any, x: Tensor) -> Any:
    table = F.interpolate(net.table.mT, STEPS, mode="linear").mT
    return net.head(torch.tanh(x + table).mean(1))


def _scaled(net: Any, x: Tensor) -> Any:
    return net.head(torch.tanh(x * net.table[:, :STEPS]).mean(1))


@pytest.mark.parametrize("forward", [_resized, _scaled])
def test_what_is_no_look_up_is_refused(forward: Any) -> None:
    net = Net(forward, head=nn.Linear(DIM, 3))
    net.table = nn.Parameter(torch.randn(1, NUM, DIM))
    with pytest.raises(UnsupportedError, match="Kronecker structure is needed"):
        run(net, KFLR())


def test_maps_have_no_axis_of_features() -> None:
    net = Net(lambda net, x: net.head((x.unsqueeze(1) + net.table).flatten(1)))
    net.head, net.table = nn.Linear(2 * STEPS * DIM, 3), nn.Parameter(torch.randn(1, 2, STEPS, DIM))
    with pytest.raises(UnsupportedError, match="Kronecker structure is needed"):
        run(net, KFLR())
