"""The kit sees wrong declarations of how values scale and combine."""

from __future__ import annotations

import pytest
import torch

from backpack_core.testing import ExtensionCase, Quantity, check_case
from backpack_products import FirstOrderExtension
from backpack_products.merging import OverBatches, Part, Refused
from backpack_products.operations import batch_sum

CHECKS = ("degree", "two_halves_mean", "two_halves_sum")


class Gradient(FirstOrderExtension):
    """The gradient once more."""

    savefield = "same_gradient"
    degree = 1
    over_batches = "sum"
    needs = (batch_sum,)

    def read(self, product):
        return batch_sum(product).squeeze(0)


class Twice(Gradient):
    degree = 2


class Averaged(Gradient):
    over_batches = OverBatches({"": Part("mean")})


class BesideEachOther(Gradient):
    over_batches = "concatenate"


class PerSample(Gradient):
    def read(self, product):
        return torch.ones(product.samples)


class Unexplained(Gradient):
    over_batches = Refused("no")


class Added(Gradient):
    over_batches = staticmethod(lambda first, second: first + second)


class AddedByFunction(Gradient):
    def over_batches(first, second):
        return first + second


class OfAWrongDegree(Gradient):
    degree = 2
    over_batches = FirstOrderExtension.over_batches


class Undeclared(Gradient):
    degree = None
    over_batches = FirstOrderExtension.over_batches


QUANTITY = Quantity(lambda reference, name: reference.gradients(name).sum(0))


@pytest.mark.parametrize(
    ("kind", "failed"),
    [
        (Gradient, ()),
        (Added, ()),
        (AddedByFunction, ()),
        (Undeclared, ()),
        (OfAWrongDegree, ("degree",)),
        (Twice, ("degree", "two_halves_mean")),
        (Averaged, ("two_halves_mean", "two_halves_sum")),
        (BesideEachOther, ("two_halves_mean", "two_halves_sum")),
        (Unexplained, ("two_halves_mean", "two_halves_sum")),
    ],
)
def test_declarations_are_checked(kind, failed):
    results = check_case(ExtensionCase(kind, QUANTITY), CHECKS)
    found = tuple(result.check for result in results if not result.ok)
    assert found == failed, results


class Number(Gradient):
    """A value that is no tensor, and a degree."""

    def read(self, product):
        return float(super().read(product).square().sum())


def test_a_value_that_is_no_tensor_needs_more_than_a_degree():
    case = ExtensionCase(Number, Quantity(lambda r, name: torch.ones(()), lambda v, r, n: v))
    (result,) = check_case(case, ["degree"])
    assert "derive over_batches from backpack_products.merging.OverBatches" in result.message


class SaysSamplesAdd(PerSample):
    sums_samples = True


def test_values_of_each_sample_do_not_add():
    (result,) = check_case(ExtensionCase(SaysSamplesAdd, QUANTITY), ["samples_add"])
    assert "sums_samples is declared" in result.message


def test_values_of_several_shapes_are_not_added():
    results = check_case(
        ExtensionCase(PerSample, Quantity(lambda r, name: torch.ones(r.samples))), CHECKS[2:]
    )
    assert "adds values of two batches, but they have the shapes [[1], [2]]" in results[0].message
