"""Versions of one operation for one form, from two packages, are a conflict like any other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from backpack_core import prefer
from backpack_core.errors import PluginConflictError, PluginError
from backpack_core.extensions import BatchGrad, GGNGram
from backpack_core.preferences import preferred
from backpack_products import AffineProduct, FirstOrderExtension, LookupProduct, SampleProduct
from backpack_products.affine import for_weights
from backpack_products.open_functions import OpenFunction, Operation
from backpack_products.operations import square_sum, weighted_sum
from tests.cases import classification
from tests.contract.products import affine, table


def of_affine() -> SampleProduct:
    return affine(1, (1, 6, 2)).product


KEY = "largest/backpack_products.affine.AffineProduct"
Version = Callable[[AffineProduct], Tensor]


class Special(LookupProduct):
    """A form of one's own."""


@pytest.fixture(autouse=True)
def preferences() -> Iterator[None]:
    """Those of one test."""
    before = dict(preferred)
    yield
    preferred.clear()
    preferred.update(before)


def version_of(package: str, number: float) -> Version:
    """A version that gives a number, as if it stood in some package."""

    def largest_affine(product: AffineProduct) -> Tensor:
        return torch.tensor(number)

    largest_affine.__module__ = f"{package}.forms"
    return largest_affine


def largest_of(*packages: str) -> Operation[Tensor]:
    @Operation
    def largest(product: SampleProduct) -> Tensor:
        return torch.tensor(-1.0)

    for number, package in enumerate(packages):
        largest.register(version_of(package, number))
    return largest


def test_one_package_may_register_again() -> None:
    assert largest_of("fast", "fast")(of_affine()) == 1


@pytest.mark.parametrize(
    "packages", [("fast", "backpack_firstorder"), ("backpack_firstorder", "fast")]
)
def test_two_packages_are_a_conflict_where_the_form_is_met(packages: tuple[str, str]) -> None:
    largest = largest_of(*packages)
    assert largest(table().product) == -1
    with pytest.raises(PluginConflictError) as error:
        largest(of_affine())
    for word in (f"the version '{KEY}'", "fast", "backpack-plugin-firstorder 0.", "prefer("):
        assert word in str(error.value)


def test_the_user_chooses_and_may_change_their_mind() -> None:
    largest = largest_of("fast", "backpack_firstorder")
    prefer("fast", KEY)
    assert largest(of_affine()) == 0
    prefer("backpack-plugin-firstorder", KEY)
    assert largest(of_affine()) == 1


def test_a_contraction_of_the_core_is_not_replaced_in_silence() -> None:
    @OpenFunction
    def total(product: SampleProduct) -> Tensor:
        return torch.tensor(-1.0)

    @for_weights(total)
    def of_weights(product: AffineProduct, inp: Tensor) -> Tensor:
        return torch.tensor(0.0)

    assert of_weights.__module__ == __name__
    assert total(of_affine()) == 0
    total.register(version_of("fast", 1))
    with pytest.raises(PluginConflictError, match="fast and test"):
        total(of_affine())


def unannotated(product, weights: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    return weights


def of_a_tensor(product: Tensor | AffineProduct) -> Tensor:
    return torch.tensor(0.0)


@pytest.mark.parametrize("version", [unannotated, of_a_tensor, lambda product: product])
def test_a_version_for_no_form(version: Callable[..., Tensor]) -> None:
    """It would never be called."""
    with pytest.raises(PluginError, match=r"largest\.register takes a function whose first"):
        largest_of().register(version)


def test_a_parent_form_is_no_rival() -> None:
    @weighted_sum.register
    def special(product: Special, weights: Tensor) -> Tensor:
        return weights

    product = table().product
    weights = torch.zeros(1, product.columns, product.samples)
    assert weighted_sum(product, weights) is not weights
    product.__class__ = Special
    assert weighted_sum(product, weights) is weights


def test_the_conflict_says_where() -> None:
    largest = largest_of("fast", "faster")

    class Largest(FirstOrderExtension):
        savefield = "largest"

        def read(self, product: SampleProduct) -> Tensor:
            return largest(product)

    problem = classification(nn.Sequential(nn.Linear(3, 3)), (3,))
    with pytest.raises(PluginConflictError, match=r"fast and faster[^[]*\[Largest.*Linear '0'"):
        problem.run(Largest())


def test_copies_and_files_of_what_was_read_know_the_operation() -> None:
    assert copy.deepcopy(square_sum) is square_sum
    assert pickle.loads(pickle.dumps(square_sum)) is square_sum
    problem = classification(nn.Sequential(nn.Linear(3, 3)), (3,))
    problem.run(GGNGram(), BatchGrad())
    weight = problem.parameters[0]
    restored = pickle.loads(pickle.dumps(weight.ggn_gram))
    assert torch.equal(restored.gram, weight.ggn_gram.gram)
    assert torch.equal(restored.eigenvectors(2), weight.ggn_gram.eigenvectors(2))
