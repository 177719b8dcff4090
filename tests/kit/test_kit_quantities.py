"""Extensions that are wrong, and oracles that authors bring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backpack_core import FirstOrderExtension, LayerRule, ModuleCall, ops
from backpack_core.errors import UsageError
from backpack_core.testing import ExtensionCase, Quantity, check_extension, register_quantity
from backpack_core.testing.quantities import quantity_of


class Largest(FirstOrderExtension):
    """The largest individual gradient, entry by entry."""

    savefield = "largest"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        return ops.per_sample(rule, call, name, mat)[0].amax(0)


class LargestOfTwo(Largest):
    """Looks at two samples only."""

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        return ops.per_sample(rule, call, name, mat)[0, :2].amax(0)


class Accumulating(Largest):
    """Adds to what it said before."""

    savefield = "accumulating"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        before = getattr(call.module.get_parameter(name), self.savefield, 0.0)
        return before + super().read(rule, call, name, mat)


QUANTITY = Quantity(lambda reference, name: reference.gradients(name).amax(0))


def faults(case: ExtensionCase) -> set[str]:
    return {result.check for result in check_extension(case) if not result.ok}


def test_an_author_brings_an_oracle() -> None:
    assert faults(ExtensionCase(Largest, QUANTITY)) == set()


def test_a_wrong_extension_is_found() -> None:
    found = faults(ExtensionCase(LargestOfTwo, QUANTITY))
    assert {"value_mean", "value_sum"} <= found
    assert "value_batch_of_one" not in found


def test_an_extension_that_accumulates_is_found() -> None:
    assert "value_overwritten" in faults(ExtensionCase(Accumulating, QUANTITY))


def test_without_an_oracle_values_must_be_finite() -> None:
    class Infinite(Largest):
        def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
            return super().read(rule, call, name, mat) / 0

    results = check_extension(ExtensionCase(Infinite), ["value_mean"])
    assert "finite" in results[0].message


def test_the_table_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from backpack_core.testing import quantities

    monkeypatch.setattr(quantities, "_QUANTITIES", dict(quantities._QUANTITIES))
    register_quantity("largest", QUANTITY)
    assert quantity_of("largest") is QUANTITY
    with pytest.raises(UsageError, match="already"):
        register_quantity("largest", QUANTITY)


def test_an_observed_value_must_be_a_tensor() -> None:
    quantity = Quantity(lambda reference, name: torch.zeros(()))
    with pytest.raises(UsageError, match="no tensor"):
        quantity.observe("text", None, "weight")  # type: ignore[arg-type]
