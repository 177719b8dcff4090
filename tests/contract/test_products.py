"""Each form of a product times each operation, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import extend
from backpack_firstorder.products import inner, norm
from backpack_firstorder.single import in_single
from backpack_products import SampleProduct
from backpack_products import operations as ops
from backpack_products.tuning import memory_budget
from backpack_products.tuning import within_budget as budget
from tests.contract.products import FORMS, SAMPLES
from tests.oracle import assert_close

Definition = Callable[[Tensor], Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def weights(columns: int) -> Tensor:
    return draw(5, columns, SAMPLES)


# An operation on a product, and what it is of M, [V, N, *θ].
OPERATIONS: dict[str, tuple[Callable[[SampleProduct], Tensor], Definition]] = {
    "dense": (ops.dense, lambda m: m),
    "square_sum": (ops.square_sum, lambda m: m.square().sum((0, 1))),
    "per_sample_square_sum": (ops.per_sample_square_sum, lambda m: m.square().sum(0)),
    "squared_norm": (ops.squared_norm, lambda m: m.square().sum((2, 3))),
    "norm": (
        lambda product: norm(in_single(product)).value(),
        lambda m: m.square().sum((2, 3)).sqrt(),
    ),
    "batch_sum": (ops.batch_sum, lambda m: m.sum(1)),
    "gram": (ops.gram, lambda m: torch.einsum("vnij,wmij->vnwm", m, m)),
    "weighted_sum": (
        lambda p: ops.weighted_sum(p, weights(p.columns)),
        lambda m: torch.einsum("kvn,vnij->kij", weights(len(m)), m),
    ),
    "weighted_sum of one": (
        lambda p: ops.weighted_sum(p, weights(p.columns)[:1]),
        lambda m: torch.einsum("kvn,vnij->kij", weights(len(m))[:1], m),
    ),
}
# What others in the pass may need, so that one thing is computed for several.
PLANS: dict[str, frozenset[Any]] = {
    "alone": frozenset(),
    "moments": frozenset({ops.batch_sum, ops.square_sum}),
    "squares": frozenset({ops.square_sum, ops.per_sample_square_sum, ops.batch_sum}),
    "formed": frozenset({ops.dense}),
}

# Of one number of columns.
SINGLE = {form for form in FORMS if form.endswith("one column")}
PAIRS = [
    (form, other) for form in FORMS for other in FORMS if (form in SINGLE) == (other in SINGLE)
]

forms = pytest.mark.parametrize("form", FORMS)
operations = pytest.mark.parametrize("operation", OPERATIONS)


@pytest.mark.grid(4)
@forms
@operations
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", [None, 1, 500])
def test_value(form: str, operation: str, plan: str, size: int | None) -> None:
    with torch.no_grad(), budget(size or memory_budget()):
        product, matrix, _ = FORMS[form]()
        product.needs = PLANS[plan]
        apply, definition = OPERATIONS[operation]
        assert_close(apply(product), definition(matrix), rtol=1e-12)


@forms
@pytest.mark.parametrize("plan", PLANS)
def test_one_after_the_other(form: str, plan: str) -> None:
    """What one operation left on the product is right for the next."""
    with torch.no_grad():
        product, matrix, _ = FORMS[form]()
        product.needs = PLANS[plan]
        for _ in range(2):
            for apply, definition in OPERATIONS.values():
                assert_close(apply(product), definition(matrix), rtol=1e-12)


@forms
@operations
@pytest.mark.parametrize("size", [None, 1])
def test_derivative(form: str, operation: str, size: int | None) -> None:
    """Under ``create_graph``, results are functions of the factors."""
    with budget(size or memory_budget()):
        product, matrix, factors = FORMS[form]()
        apply, definition = OPERATIONS[operation]
        found, expected = apply(product), definition(matrix)
        assert_close(found.detach(), expected.detach(), rtol=1e-12)
        direction = torch.randn_like(expected)
        pairs = zip(
            torch.autograd.grad(found, factors, direction),
            torch.autograd.grad(expected, factors, direction),
            strict=True,
        )
        for ours, reference in pairs:
            assert_close(ours, reference, rtol=1e-10)


@pytest.mark.grid(4)
@pytest.mark.parametrize(("form", "other"), PAIRS)
@pytest.mark.parametrize("size", [None, 1])
def test_inner_product(form: str, other: str, size: int | None) -> None:
    with torch.no_grad(), budget(size or memory_budget()):
        (first, one, _), (second, two, _) = FORMS[form](), FORMS[other]()
        assert_close(inner(first, second), (one * two).sum((2, 3)), rtol=1e-12)


@forms
@pytest.mark.parametrize("size", [None, 1, 500])
def test_pieces_cover_everything_once(form: str, size: int | None) -> None:
    with torch.no_grad(), budget(size or memory_budget()):
        product, matrix, _ = FORMS[form]()
        found = torch.zeros_like(matrix)
        for columns, samples, piece in product.pieces():
            found[columns, samples] += piece
        assert_close(found, matrix, rtol=1e-12)


@forms
def test_any_part(form: str) -> None:
    with torch.no_grad():
        product, matrix, _ = FORMS[form]()
        for columns in (slice(0, 1), slice(0, len(matrix))):
            for samples in (slice(0, SAMPLES), slice(1, 3)):
                assert_close(product.part(columns, samples), matrix[columns, samples], rtol=1e-12)


@forms
@operations
def test_half_precision(form: str, operation: str) -> None:
    """In the dtype of the columns; norms in double precision."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.no_grad():
        found = OPERATIONS[operation][0](FORMS[form]().product)
    assert found.dtype == (torch.float64 if operation == "norm" else torch.bfloat16)
    assert bool(found.isfinite().all())


def test_a_product_says_what_it_is_of() -> None:
    product = FORMS["table"]().product
    product.name, (product.module,) = "weight", extend(nn.Sequential(nn.Embedding(2, 2)))
    assert repr(product) == "<LookupProduct [3, 4, 6, 2] of 'weight' at Embedding '0'>"
