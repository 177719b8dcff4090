"""Every contraction against the products themselves, with few and many positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from backpack_firstorder import contractions as first
from backpack_firstorder import one_column
from backpack_products import contractions
from backpack_products.rows import JoinedRows
from backpack_products.tuning import memory_budget, set_memory_budget
from backpack_secondorder import sample_squares
from tests.contract.products import Lazy
from tests.oracle import assert_close


def products(out: Tensor, inp: Tensor) -> Tensor:
    return torch.einsum("vnsgo,nsgi->vngoi", out, inp)


# Of the products [V, N, G, O, I].
CONTRACTIONS: dict[Callable[..., Tensor], Callable[[Tensor], Tensor]] = {
    contractions.products: lambda m: m,
    contractions.square_sum: lambda m: m.square().sum((0, 1)),
    sample_squares.contracted: lambda m: m.square().sum(0),
    lambda out, inp: first.norm(out, inp).squared(): lambda m: m.square().sum((2, 3, 4)),
    contractions.sums: lambda m: m.sum(1),
    contractions.gram: lambda m: torch.einsum("vngoi,wmgoi->vnwm", m, m),
    lambda out, inp: first.moments(out, inp)[0]: lambda m: m.sum(1),
    lambda out, inp: first.moments(out, inp)[1]: lambda m: m.square().sum((0, 1)),
    lambda out, inp: first.moments(out, inp, norm_=True)[2].squared(): (
        lambda m: m.square().sum((2, 3, 4))
    ),
}
NAMES = ["products", "square_sum", "per_sample_square_sum", "squared_norm", "sums", "gram",
         "first moment", "second moment", "norms along"]  # fmt: skip
# V, N, S, G, O, I: a column or several, one position, few (Gram), many, groups, large O·I.
SHAPES = [
    (1, 5, 1, 1, 3, 4),
    (3, 5, 1, 1, 3, 4),
    (3, 4, 1, 2, 3, 2),
    (1, 5, 2, 1, 7, 6),
    (2, 4, 2, 1, 7, 6),
    (1, 5, 9, 1, 3, 2),
    (3, 4, 9, 1, 3, 2),
    (3, 4, 7, 2, 3, 2),
    (1, 4, 7, 3, 2, 2),
    (2, 3, 5, 1, 128, 130),
    (1, 1, 1, 1, 1, 1),
]


@pytest.fixture(params=[None, 1, 300])
def budget(request: pytest.FixtureRequest) -> Iterator[int | None]:
    """Bytes that a piece may take."""
    before = memory_budget()
    if request.param is not None:
        set_memory_budget(request.param)
    yield request.param
    set_memory_budget(before)


def _factors(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    columns, samples, positions, groups, features, size = shape
    out = torch.randn(columns, samples, positions, groups, features)
    return out, torch.randn(samples, positions, groups, size)


@pytest.mark.parametrize("contraction", CONTRACTIONS, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("differentiable", [False, True])
def test_value(
    contraction: Callable[..., Tensor],
    shape: tuple[int, ...],
    differentiable: bool,
    budget: int | None,
) -> None:
    out, inp = _factors(shape)
    expected = CONTRACTIONS[contraction](products(out, inp))
    with torch.set_grad_enabled(differentiable):
        assert_close(contraction(out, inp), expected)
        # The layout of a convolution: positions last in memory.
        out = out.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        inp = inp.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        assert_close(contraction(out, inp), expected)


@pytest.mark.parametrize("contraction", CONTRACTIONS, ids=NAMES)
@pytest.mark.parametrize(
    "shape", [(2, 3, 1, 1, 3, 2), (2, 3, 2, 1, 7, 6), (1, 3, 5, 2, 3, 2)], ids=str
)
def test_derivative(contraction: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    factors = [f.requires_grad_() for f in _factors(shape)]
    ours = contraction(*factors)
    weights = torch.randn(ours.shape)
    expected = CONTRACTIONS[contraction](products(*factors))
    pairs = zip(
        torch.autograd.grad(ours, factors, weights),
        torch.autograd.grad(expected, factors, weights),
        strict=True,
    )
    for found, reference in pairs:
        assert_close(found, reference)


def test_pieces_cover_everything_once(budget: int | None) -> None:
    out, inp = _factors((5, 4, 3, 2, 3, 2))
    total = torch.zeros(5, 4, 2, 3, 2)
    with torch.no_grad():
        for columns, rows, piece in contractions.pieces(out, inp):
            assert budget is None or piece.nbytes <= max(budget, 8 * 12)
            total[columns, rows] += piece.permute(2, 0, 1, 3, 4)
    assert_close(total, products(out, inp))


@pytest.mark.parametrize("contraction", CONTRACTIONS, ids=NAMES)
def test_inputs_are_never_asked_for_whole(contraction: Callable[..., Tensor]) -> None:
    out, inp = _factors((2, 6, 9, 1, 3, 2))
    rows = Lazy(inp)
    before = memory_budget()
    set_memory_budget(2 * inp[0].nbytes)
    try:
        with torch.no_grad():
            found = contraction(out, rows)
    finally:
        set_memory_budget(before)
    assert_close(found, CONTRACTIONS[contraction](products(out, inp)))
    assert rows.largest <= 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("differentiable", [False, True])
def test_inner_products_of_two(
    shape: tuple[int, ...], differentiable: bool, budget: int | None
) -> None:
    """Of any numbers of positions."""
    columns, samples, positions, *rest = shape
    (out, inp), (other, seen) = _factors(shape), _factors((columns, samples, positions + 2, *rest))
    expected = (products(out, inp) * products(other, seen)).sum((2, 3, 4))
    with torch.set_grad_enabled(differentiable):
        assert_close(first.inner(out, inp, other, seen), expected)


@pytest.mark.parametrize("contraction", CONTRACTIONS, ids=NAMES)
def test_inputs_of_two_calls(contraction: Callable[..., Tensor]) -> None:
    """As positions side by side, asked for in parts only."""
    (out, inp), (other, seen) = _factors((2, 6, 3, 2, 3, 2)), _factors((2, 6, 5, 2, 3, 2))
    lazy = Lazy(inp), Lazy(seen)
    rows = JoinedRows(*lazy)
    assert rows.shape == (6, 8, 2, 2)
    before = memory_budget()
    set_memory_budget(2 * rows[0:1].nbytes)
    try:
        with torch.no_grad():
            found = contraction(torch.cat([out, other], 2), rows)
    finally:
        set_memory_budget(before)
    expected = CONTRACTIONS[contraction](products(out, inp) + products(other, seen))
    assert_close(found, expected)
    assert max(part.largest for part in lazy) <= 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments_along_with_products(shape: tuple[int, ...], budget: int | None) -> None:
    """The sum where positions are shared, the others of one column without groups, too."""
    out, inp = _factors(shape)
    with torch.no_grad():
        found, along = first.products_with(out, inp, True, True, True)
        nothing = first.products_with(out, inp, False, False, False)[1]
    assert all(value is None for value in nothing)
    expected = products(out, inp)
    assert_close(found, expected)
    columns, _, positions, groups, *_ = shape
    assert (along.sums is None) == (positions == 1)
    is_column = columns == groups == 1 < positions
    assert (along.squares is None) == (along.norms is None) == (not is_column)
    if along.sums is not None:
        assert_close(along.sums, expected.sum(1))
    if along.squares is not None:
        assert_close(along.squares, expected.square().sum((0, 1)))
        assert_close(along.norms.squared(), expected.flatten(2).square().sum(2))


@pytest.mark.parametrize("make", [lambda inp: inp, Lazy], ids=["tensor", "lazy"])
@pytest.mark.parametrize("columns", [1, 2])
def test_moments_take_pieces_of_their_own_size(
    columns: int, make: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, inp = _factors((columns, 7, 9, 1, 3, 2))
    for module, limit in ((first, "SHARED"), (one_column, "PIECE")):
        monkeypatch.setattr(module, limit, 2 * columns * 3 * 2 * 8)  # four pieces
    counts, bmm = [], torch.bmm

    def counted(*args: Tensor, **options: Tensor) -> Tensor:
        counts.append(len(args[0]))
        return bmm(*args, **options)

    monkeypatch.setattr(torch, "bmm", counted)
    with torch.no_grad():
        sums, squares, norms = first.moments(out, make(inp), norm_=True)
    assert counts == [2, 2, 2, 1]
    mat = products(out, inp)
    assert_close(sums, mat.sum(1))
    assert_close(squares, mat.square().sum((0, 1)))
    assert_close(norms.squared(), mat.flatten(2).square().sum(2))


def test_the_square_sum_of_nothing() -> None:
    out, inp = _factors((1, 0, 9, 1, 3, 2))
    with torch.no_grad():
        assert not contractions.square_sum(out, inp).any()
