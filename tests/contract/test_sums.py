"""What several uses of a parameter add up to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from backpack_core import extend
from backpack_core.contract.propagator import Reading
from backpack_core.errors import UnsupportedError
from backpack_operations.readings import joined
from backpack_products import (
    AffineProduct,
    DenseProduct,
    LookupProduct,
    SampleProduct,
    ScaleProduct,
    SumProduct,
)
from backpack_products.columns import ApartColumns, Columns, Root
from backpack_products.operations import dense, square_sum, squared_norm
from backpack_products.product import PlacedProduct, sum_of
from backpack_products.tuning import within_budget as budget
from tests.contract.products import (
    FIRST,
    SECOND,
    THIRD,
    Formed,
    affine,
    bias,
    gain,
    offset,
    rooted,
    table,
    total,
    transposed,
    values,
)
from tests.oracle import assert_close


def kinds(product: SampleProduct) -> list[type[SampleProduct]]:
    return [type(part) for part in product.parts] if isinstance(product, SumProduct) else []


def test_one_product_is_its_own_sum() -> None:
    product = table().product
    assert sum_of([product]) is product


@pytest.mark.parametrize("parts", [2, 3])
def test_affine_products_of_one_form_become_one(parts: int) -> None:
    """Positions of all uses side by side."""
    product = total(*(affine(s + 1, (2, 3, 2)) for s in range(parts))).product
    assert isinstance(product, AffineProduct)
    assert product.positions == sum(range(1, parts + 1))
    assert product.inp is not None
    assert product.inp.shape == (4, product.positions, 2, 2)


def test_as_many_uses_as_a_long_loop_has() -> None:
    """Each is copied once, and none is asked for by another one."""
    uses = 2000
    factors = [(torch.rand(1, 2, 1, 1, 2), torch.rand(2, 1, 1, 2)) for _ in range(uses)]
    product = sum_of([AffineProduct(out, inp, torch.Size((2, 2))) for out, inp in factors])
    expected = sum(torch.einsum("vnsgo,nsgi->vnoi", out, inp) for out, inp in factors)
    assert_close(dense(product), expected)


def test_biases_become_one() -> None:
    product = total(bias(1), bias(3)).product
    assert isinstance(product, AffineProduct)
    assert (product.inp, product.positions) == (None, 4)


def test_lookups_become_one() -> None:
    one, other = rooted(table(columns=1), {FIRST: 1}), rooted(table(columns=2), {SECOND: 2})
    product = sum_of([one.product, other.product])
    assert isinstance(product, LookupProduct)
    matrix = torch.cat([one.matrix, other.matrix]).detach()
    assert_close(dense(product).detach(), matrix)
    assert_close(square_sum(product).detach(), matrix.square().sum((0, 1)))


def test_inputs_of_several_uses_are_made_for_some_samples_at_a_time() -> None:
    parts = [affine(3, (1, 6, 2), lazy=True) for _ in range(2)]
    product, matrix, _ = total(*parts)
    with torch.no_grad(), budget(1):
        assert_close(square_sum(product), matrix.square().sum((0, 1)))
    assert {part.product.inp.largest for part in parts} == {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([affine(1, (1, 6, 2)), affine(1, (2, 3, 2))], [AffineProduct] * 2),
        ([affine(1, (1, 6, 2)), transposed(1)], [AffineProduct] * 2),
        ([transposed(1), transposed(1, reverse=True)], [AffineProduct] * 2),
        ([affine(1, (1, 6, 2)), table()], [AffineProduct, LookupProduct]),
        ([gain(), values(), gain()], [ScaleProduct, DenseProduct]),
        ([gain(), offset(), gain(), offset()], [ScaleProduct] * 2),
        # Neighbours or not: what has one form meets.
        ([affine(1, (1, 6, 2)), table(), affine(2, (1, 6, 2))], [AffineProduct, LookupProduct]),
    ],
    ids=["groups", "arrangement", "two arrangements", "table", "gain", "offset", "apart"],
)
def test_other_forms_stay_side_by_side(parts: list[Formed], expected: list[type]) -> None:
    assert kinds(total(*parts).product) == expected


def test_an_arrangement_that_changes_nothing_is_no_other_form() -> None:
    """As of a weight that was transposed twice."""
    one, other = affine(1, (1, 6, 2)), affine(2, (1, 6, 2))
    second = other.product
    assert isinstance(second, AffineProduct)
    second.arrange = lambda mat: mat.reshape(*mat.shape[:-3], *second.shape)
    for parts in ([one, other], [other, one]):
        product, matrix, _ = total(*parts)
        assert isinstance(product, AffineProduct)
        assert_close(dense(product).detach(), matrix.detach())


def test_two_columns_of_one_root_are_added() -> None:
    one, other = (rooted(affine(1, (1, 6, 2)), {FIRST: 3}) for _ in range(2))
    product, matrix, _ = total(one, other)
    assert isinstance(product, AffineProduct)
    assert product.roots == {FIRST: 3}
    assert_close(dense(product).detach(), matrix.detach())


def test_columns_of_different_roots_stay_apart() -> None:
    one = rooted(values(columns=1), {FIRST: 1})
    other = rooted(values(columns=2), {SECOND: 2})
    product = sum_of([one.product, other.product])
    assert product.roots == {FIRST: 1, SECOND: 2}
    assert kinds(product) == [PlacedProduct] * 2
    assert_close(dense(product).detach(), torch.cat([one.matrix, other.matrix]).detach())


@pytest.mark.parametrize("make", [lambda n: affine(2, (2, 3, 2), columns=n), lambda n: bias(2, n)])
def test_columns_of_different_roots_keep_an_affine_form(make: Callable[[int], Formed]) -> None:
    """With zeros where a root has no columns, so that there is nothing to form."""
    one, other = rooted(make(1), {SECOND: 1}), rooted(make(3), {FIRST: 2, THIRD: 1})
    product = sum_of([one.product, other.product])
    assert isinstance(product, AffineProduct)
    assert (product.roots, product.positions) == ({SECOND: 1, FIRST: 2, THIRD: 1}, 4)
    matrix = torch.cat([one.matrix, other.matrix]).detach()
    assert_close(dense(product).detach(), matrix)
    assert_close(square_sum(product).detach(), matrix.square().sum((0, 1)))


def test_the_order_of_roots_does_not_matter() -> None:
    one = rooted(values(columns=3), {FIRST: 1, SECOND: 2})
    other = rooted(values(columns=3), {SECOND: 2, FIRST: 1})
    product = sum_of([one.product, other.product])
    expected = one.matrix + other.matrix.roll(1, 0)
    assert product.roots == {FIRST: 1, SECOND: 2}
    assert_close(dense(product).detach(), expected.detach())


def test_placed_columns_in_parts() -> None:
    """Any part of the columns, whatever roots they belong to."""
    product = PlacedProduct(
        rooted(values(columns=3), {SECOND: 2, THIRD: 1}).product, {FIRST: 2, SECOND: 2, THIRD: 1}
    )
    whole = dense(product)
    assert not whole[:2].any()
    for start in range(5):
        for stop in range(start + 1, 6):
            part = product.part(slice(start, stop), slice(1, 3))
            assert torch.equal(part, whole[start:stop, 1:3])


def test_norms_of_a_sum_are_not_negative() -> None:
    """Nor where the uses of a parameter cancel, up to rounding."""
    one = affine(2, (1, 6, 2))
    out, inp = one.factors
    flipped, shape = -out.flip(-1), one.product.shape
    other = AffineProduct(flipped, inp, shape, lambda mat: mat.squeeze(-3).flip(-2))
    product = sum_of([one.product, other])
    assert kinds(product) == [AffineProduct] * 2
    squares = squared_norm(product)
    assert bool(((squares >= 0) & (squares < 1e-12)).all())


def test_what_has_no_sum_says_so() -> None:
    reading = Reading(torch.Size((3, 2)))
    reading.name, (reading.module,) = "weight", extend(nn.Sequential(nn.Linear(2, 2)))
    message = r"'weight' of Linear '0' is used 3 times, and Reading has no meaning there"
    with pytest.raises(UnsupportedError, match=message):
        joined([reading, Reading(reading.shape), Reading(reading.shape)])


@pytest.mark.parametrize("is_first", [True, False])
def test_columns_of_all_samples_and_of_each_apart_do_not_meet(is_first: bool) -> None:
    root = Root("of either")
    plain, apart = Columns({root: torch.ones(1, 2, 2)}), ApartColumns({root: torch.ones(1, 2, 2)})
    first, second = (plain, apart) if is_first else (apart, plain)
    with pytest.raises(AssertionError, match="met columns of all samples"):
        first.merge(second)
