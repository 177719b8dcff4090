"""Operations are computed once, serve one another, and are open to everyone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension
from backpack_core.extensions import (
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_firstorder import contractions as norms
from backpack_products import (
    AffineProduct,
    FirstOrderExtension,
    LookupProduct,
    SampleProduct,
    contractions,
)
from backpack_products import affine as forms
from backpack_products.open_functions import Operation
from backpack_products.operations import (
    batch_sum,
    dense,
    per_sample_square_sum,
    square_sum,
    weighted_sum,
)
from backpack_secondorder import sample_squares
from tests import oracle
from tests.cases import Problem, classification
from tests.contract.products import FORMS, affine, table, values
from tests.oracle import assert_close


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Note every call of a function from now on."""
    calls: list[str] = []
    original: Callable[..., Any] = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)
    return calls


# Computed once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_result_is_computed_once(form: str) -> None:
    calls: list[SampleProduct] = []

    @Operation
    def count(product: SampleProduct) -> Tensor:
        calls.append(product)
        return batch_sum(product)

    product, other = FORMS[form]().product, FORMS[form]().product
    assert count(product) is count(product) is batch_sum(product)
    assert calls == [product]
    count(other)
    assert calls == [product, other]


def test_settings_tell_results_apart() -> None:
    calls: list[float] = []

    @Operation
    def power(product: SampleProduct, exponent: float = 1.0) -> Tensor:
        calls.append(exponent)
        return dense(product) ** exponent

    product, matrix, _ = values()
    for exponent in (2.0, 3.0, 2.0):
        assert_close(power(product, exponent).detach(), matrix.detach() ** exponent)
    power(product)
    assert calls == [2.0, 3.0, 1.0]


def test_extensions_of_one_pass_share_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SampleProduct] = []
    for kind in (BatchGrad, BatchL2Grad, SumGradSquared):
        original = kind.read
        monkeypatch.setattr(kind, "read", lambda self, p, o=original: seen.append(p) or o(self, p))
    conv(BatchGrad(), BatchL2Grad(), SumGradSquared())
    assert len(seen) == 6
    assert len(set(map(id, seen))) == 2  # weight and bias


# One serves another -------------------------------------------------------------------------------


def conv(*extensions: Extension) -> Problem:
    """A convolution, whose weight is shared by positions, as the whole model."""
    problem = classification(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten()), (2, 4), classes=9)
    problem.run(*extensions, check="never")  # else sums are read, too, and compared
    return problem


# What stands in a family.
HOMES = dict.fromkeys(("moments", "norm", "products_with"), norms)
HOMES |= {"contracted": sample_squares}
# What extensions ask for, and how often each contraction runs for the weight.
PLANS: list[tuple[tuple[type[Extension], ...], dict[str, int]]] = [
    ((SumGradSquared,), {"square_sum": 1, "moments": 0, "sums": 0, "products_with": 0}),
    ((Variance,), {"square_sum": 0, "moments": 1, "sums": 0, "products_with": 0}),
    ((Variance, SumGradSquared), {"square_sum": 0, "moments": 1, "sums": 0, "products_with": 0}),
    ((BatchL2Grad,), {"norm": 1, "products_with": 0}),
    (
        (BatchGrad, BatchL2Grad, Variance),
        {"products_with": 1, "norm": 0, "moments": 0, "square_sum": 0, "sums": 0},
    ),
    (
        (DiagGGNExact, BatchDiagGGNExact),
        {"contracted": 1, "square_sum": 0, "products": 0},
    ),
    # Of different propagators, they have products of their own.
    ((BatchGrad, DiagGGNExact), {"products_with": 1, "square_sum": 1}),
]


@pytest.mark.parametrize(("extensions", "expected"), PLANS, ids=str)
def test_what_one_needs_serves_the_others(
    extensions: tuple[type[Extension], ...],
    expected: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = {name: counted(monkeypatch, HOMES.get(name, contractions), name) for name in expected}
    problem = conv(*(kind() for kind in extensions))
    assert {name: len(found) for name, found in calls.items()} == expected
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = problem.expected(oracle.ggn_diagonals)
    for field, reference in {
        "grad_batch": gradients,
        "sum_grad_squared": [g.square().sum(0) for g in gradients],
        "batch_l2": [g.flatten(1).square().sum(1) for g in gradients],
        "variance": [g.var(0, correction=0) for g in gradients],
        "diag_ggn_exact": [d.sum(0) for d in diagonals],
        "diag_ggn_exact_batch": diagonals,
    }.items():
        if field in {kind.savefield for kind in extensions}:
            problem.compare(field, reference)


def test_moments_come_from_the_same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = counted(monkeypatch, norms, "pieces")
    with torch.no_grad():
        product, matrix, _ = affine(5, (1, 6, 2))
        product.needs = frozenset({batch_sum, square_sum})
        assert_close(square_sum(product), matrix.square().sum((0, 1)))
        assert_close(batch_sum(product), matrix.sum(1))
    assert pieces == ["pieces"]


def test_with_one_position_reading_what_was_formed_costs_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formed = counted(monkeypatch, forms, "as_formed")
    with torch.no_grad():
        for positions in (1, 5):
            product = affine(positions, (1, 6, 2)).product
            product.needs = frozenset({dense})
            square_sum(product)
            assert formed == ["as_formed"] * (positions > 1)


def test_needs_are_those_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[frozenset[Any]] = []
    original = SumGradSquared.read
    monkeypatch.setattr(
        SumGradSquared, "read", lambda self, p: seen.append(p.needs) or original(self, p)
    )
    conv(SumGradSquared(), Variance(), DiagGGNExact())
    assert seen == [frozenset({square_sum, batch_sum})] * 2


# Open ---------------------------------------------------------------------------------------------


def formed_largest(product: SampleProduct) -> Tensor:
    """``max_n |Σ_v M[v, n]|``, entry by entry. Shape ``[*θ]``."""
    result = product.new_zeros(*product.shape)
    for rows in range(product.samples):
        sample = product.part(slice(0, product.columns), slice(rows, rows + 1))
        result = torch.maximum(result, sample.sum((0, 1)).abs())
    return result


largest = Operation(formed_largest)
CALLS: list[str] = []


@largest.register
def largest_affine(product: AffineProduct) -> Tensor:
    """From the factors, without shared positions."""
    CALLS.append(product.name)
    if product.positions > 1 or product.inp is None:
        return formed_largest(product)
    out, inp = product.out.sum((0, 2)).abs(), product.inp[0 : product.samples].squeeze(1).abs()
    return product.to_parameter((out.unsqueeze(-1) * inp.unsqueeze(-2)).amax(0))


class Largest(FirstOrderExtension):
    """An extension of somebody else's, with an operation of its own."""

    savefield = "largest"
    needs = (largest,)

    def read(self, product: SampleProduct) -> Tensor:
        return largest(product)


def test_an_operation_of_somebody_else() -> None:
    """Its version for affine products where there are some, its definition elsewhere."""
    CALLS.clear()
    model = nn.Sequential(
        nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(8, 3)
    )
    tokens = torch.randint(0, 5, (4, 2))
    problem = Problem(model, (tokens,), nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 1]))
    problem.run(Largest(), BatchGrad())
    gradients = problem.expected(oracle.individual_gradients)
    problem.compare("largest", [g.abs().amax(0) for g in gradients])
    assert sorted(CALLS) == ["bias", "bias", "weight", "weight"]


class TurnedTable(LookupProduct):
    """A form of somebody else's: rows are counted from the last one."""

    def part(self, columns: slice, samples: slice) -> Tensor:
        return LookupProduct(self.out, self.shape[0] - 1 - self.row, self.shape).part(
            columns, samples
        )


def _turned() -> tuple[SampleProduct, Tensor]:
    product, matrix, _ = table()
    assert isinstance(product, LookupProduct)
    row = product.shape[0] - 1 - product.row
    return TurnedTable(product.out, row, product.shape), matrix


@batch_sum.register
def batch_sum_turned(product: TurnedTable) -> Tensor:
    return dense(product).sum(1)


@weighted_sum.register
def weighted_sum_turned(product: TurnedTable, weights: Tensor) -> Tensor:
    return torch.einsum("kvn,vn...->k...", weights, dense(product))


def test_a_form_of_somebody_else_has_the_versions_of_its_parents_or_its_own() -> None:
    with torch.no_grad():
        product, matrix = _turned()
        weights = torch.randn(2, *matrix.shape[:2])
        assert_close(dense(product), matrix)
        assert_close(batch_sum(product), matrix.sum(1))
        expected = torch.einsum("kvn,vnij->kij", weights, matrix)
        assert_close(weighted_sum(product, weights), expected)
        assert_close(per_sample_square_sum(product), matrix.square().sum(0))  # the definition
        # The version of its parent, which counts rows from the first one.
        assert not torch.allclose(square_sum(product), matrix.square().sum((0, 1)))


def test_an_operation_knows_the_forms_it_has_versions_for() -> None:
    assert largest.has_version(AffineProduct)
    assert square_sum.has_version(TurnedTable)  # its parent's
    assert not largest.has_version(LookupProduct)
    assert not dense.has_version(SampleProduct)


def test_an_operation_has_the_name_and_text_of_its_definition() -> None:
    assert repr(square_sum) == "<operation square_sum>"
    assert largest.__doc__ is not None
    assert "Shape" in largest.__doc__


def test_a_version_counts_from_when_it_is_registered() -> None:
    """What a form led to before is looked up again."""

    @Operation
    def form(product: SampleProduct) -> str:
        return "definition"

    assert form(affine(1, (1, 6, 2)).product) == "definition"

    @form.register
    def form_affine(product: AffineProduct) -> str:
        return "version"

    assert form(affine(1, (1, 6, 2)).product) == "version"
