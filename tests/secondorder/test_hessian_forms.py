"""The forms of a Hessian at one tensor agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backpack_products import Columns
from backpack_secondorder.hessian import Factored, Hessian
from tests.oracle import assert_close

N, SHAPE = 3, (2, 2)
D = 4


def columns(count: int = 5) -> Columns:
    signs = torch.randint(0, 2, (count, N)).double() * 2 - 1
    signed = Columns.start("a", torch.randn(count, N, *SHAPE), signs)
    return signed.merge(Columns.start("b", torch.randn(2, N, *SHAPE)))


def block() -> Tensor:
    half = torch.randn(N, D, D)
    return (half + half.mT).transpose(0, 1).reshape(D, N, *SHAPE)


def factored() -> Factored:
    return Factored(torch.randn(6, 1, *SHAPE), torch.randn(6, N), torch.randn(N, *SHAPE))


def dense(hessian: Hessian) -> Tensor:
    """``[N, D, D]``, from the definition."""
    total = torch.zeros(N, D, D)
    for root, mat in hessian.signed_columns():
        weights = torch.ones(mat.shape[:2]) if root.signs is None else root.signs
        total += torch.einsum("vn,vna,vnb->nab", weights, mat.flatten(2), mat.flatten(2))
    if hessian.diagonal is not None:
        total += torch.diag_embed(hessian.diagonal.flatten(1))
    if hessian.factored is not None:
        rows = hessian.factored.rows.flatten(1)
        inner = torch.einsum("va,vn,vb->nab", rows, hessian.factored.weights, rows)
        scale = hessian.factored.scale.flatten(1)
        total += scale.unsqueeze(2) * inner * scale.unsqueeze(1)
    if hessian.block is not None:
        total += hessian.block.flatten(2).transpose(0, 1)
    if hessian.rows is not None:
        size, rows = hessian.rows
        total += rows(slice(0, size)).flatten(2).transpose(0, 1)
    return total


def lazy() -> tuple[int, Callable[[slice], Tensor]]:
    formed = block()
    return D, lambda some: formed[some]


def cases() -> dict[str, Hessian]:
    torch.manual_seed(0)
    return {
        "columns": Hessian(columns()),
        "diagonal": Hessian(diagonal=torch.randn(N, *SHAPE)),
        "factored": Hessian(factored=factored()),
        "block": Hessian(block=block()),
        "rows": Hessian(rows=lazy()),
        "all": Hessian(columns(), torch.randn(N, *SHAPE), factored(), block()),
    }


FORMED = ["columns", "diagonal", "factored", "block", "all"]
NAMES = [*FORMED, "rows"]


@pytest.mark.parametrize("name", NAMES)
def test_columns(name: str) -> None:
    hessian = cases()[name]
    found = hessian.as_columns()
    assert (found.diagonal, found.factored, found.block, found.rows) == (None,) * 4
    assert found.formed == hessian.formed + hessian.unformed
    assert_close(dense(found), dense(hessian))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("name", NAMES)
def test_chunks(name: str, size: int) -> None:
    """What is not formed yet, in parts of limited size; a block's go in pairs."""
    hessian = cases()[name]
    parts = list(hessian.chunks(size))
    assert all(part.formed <= max(2, size) for part in parts)
    assert sum(part.formed for part in parts) == hessian.unformed
    total = sum(map(dense, parts), torch.zeros(N, D, D))
    assert_close(total, dense(hessian) - dense(Hessian(hessian.columns)))


@pytest.mark.parametrize("name", FORMED)
def test_block(name: str) -> None:
    hessian = cases()[name]
    found = hessian.as_block()
    assert (found.columns, found.diagonal, found.factored) == (None,) * 3
    assert_close(dense(found), dense(hessian))


def test_rows_are_formed_as_a_block() -> None:
    hessian = cases()["rows"].merge(cases()["all"])
    found = hessian.with_rows_formed()
    assert found.rows is None
    assert_close(dense(found), dense(hessian))
    twice = cases()["rows"].merge(cases()["rows"])
    assert_close(dense(twice), 2 * dense(cases()["rows"]))


@pytest.mark.parametrize("name", FORMED[1:])
def test_diagonal_of_all_but_the_columns(name: str) -> None:
    hessian = cases()[name]
    own = dense(hessian) - dense(Hessian(hessian.columns))
    assert hessian.own_diagonal is not None
    assert_close(hessian.own_diagonal.flatten(1), own.diagonal(dim1=1, dim2=2))


def test_columns_alone_have_no_diagonal_of_their_own() -> None:
    assert cases()["columns"].own_diagonal is None


@pytest.mark.parametrize("name", FORMED)
def test_scale(name: str) -> None:
    hessian = cases()[name]
    scale = torch.randn(N, *SHAPE)
    outer = torch.einsum("na,nb->nab", scale.flatten(1), scale.flatten(1))
    assert_close(dense(hessian.scaled(scale)), dense(hessian) * outer)


@pytest.mark.parametrize("name", NAMES)
def test_merge(name: str) -> None:
    hessian, other = cases()[name], cases()["all"]
    expected = dense(hessian) + dense(other)
    assert_close(dense(hessian.merge(other)), expected)
    assert_close(dense(other.merge(hessian)), expected)


def test_branched_columns_stay_columns() -> None:
    found = columns()
    first, second = found.blocks
    hessian = Hessian(found, branched=frozenset([first])).as_block()
    assert hessian.columns is not None
    assert set(hessian.columns.blocks) == {first}
    assert second not in hessian.columns.blocks
    assert_close(dense(hessian), dense(Hessian(found)))
