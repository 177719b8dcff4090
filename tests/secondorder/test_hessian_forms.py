"""The forms of a Hessian at one tensor agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backpack_core import Columns
from backpack_secondorder.hessian import Hessian, Spread
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


def spread() -> Spread:
    return Spread(torch.randn(6, 1, *SHAPE), torch.randn(6, N), torch.randn(N, *SHAPE))


def dense(hessian: Hessian) -> Tensor:
    """``[N, D, D]``, from the definition."""
    total = torch.zeros(N, D, D)
    for mat, signs in hessian.signed_columns():
        weights = torch.ones(mat.shape[:2]) if signs is None else signs
        total += torch.einsum("vn,vna,vnb->nab", weights, mat.flatten(2), mat.flatten(2))
    if hessian.diagonal is not None:
        total += torch.diag_embed(hessian.diagonal.flatten(1))
    if hessian.spread is not None:
        rows = hessian.spread.rows.flatten(1)
        inner = torch.einsum("va,vn,vb->nab", rows, hessian.spread.weights, rows)
        scale = hessian.spread.scale.flatten(1)
        total += scale.unsqueeze(2) * inner * scale.unsqueeze(1)
    if hessian.block is not None:
        total += hessian.block.flatten(2).transpose(0, 1)
    return total


def cases() -> dict[str, Hessian]:
    torch.manual_seed(0)
    return {
        "columns": Hessian(columns()),
        "diagonal": Hessian(diagonal=torch.randn(N, *SHAPE)),
        "spread": Hessian(spread=spread()),
        "block": Hessian(block=block()),
        "all": Hessian(columns(), torch.randn(N, *SHAPE), spread(), block()),
    }


NAMES = ["columns", "diagonal", "spread", "block", "all"]


@pytest.mark.parametrize("name", NAMES)
def test_forms(name: str) -> None:
    hessian = cases()[name]
    expected = dense(hessian)
    assert_close(dense(hessian.as_columns()), expected)
    assert hessian.as_columns().block is None
    assert_close(dense(hessian.as_block()), expected)
    assert hessian.as_block().columns is None
    assert_close(dense(hessian.formed()), expected)
    if name != "columns":
        own = dense(Hessian(None, hessian.diagonal, hessian.spread, hessian.block))
        assert_close(hessian.own_diagonal().flatten(1), own.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("name", NAMES)
def test_operations(name: str) -> None:
    hessian = cases()[name]
    expected = dense(hessian)
    mat = torch.randn(7, N, *SHAPE)
    product = torch.einsum("nab,vnb->vna", expected, mat.flatten(2)).reshape(mat.shape)
    assert_close(hessian.matmul(mat), product)
    scale = torch.randn(N, *SHAPE)
    outer = torch.einsum("na,nb->nab", scale.flatten(1), scale.flatten(1))
    assert_close(dense(hessian.scaled(scale)), expected * outer)
    other = cases()["all"]
    assert_close(dense(hessian.merge(other)), expected + dense(other))


def test_branched_columns_stay_columns() -> None:
    found = columns()
    first, second = found.blocks
    hessian = Hessian(found, branched=frozenset([first])).as_block()
    assert hessian.columns is not None
    assert set(hessian.columns.blocks) == {first}
    assert second not in hessian.columns.blocks
    assert_close(dense(hessian), dense(Hessian(found)))
