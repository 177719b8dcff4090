"""The numbers of the migration page: what differs from the incumbent is what autograd says."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text()


@pytest.fixture(scope="module")
def differences() -> ModuleType:
    return importlib.import_module("benchmarks.differences")


@pytest.mark.host("the page has the numbers of a CPU")
@pytest.mark.parametrize("row", range(11))
def test_numbers_are_right(differences: ModuleType, row: int) -> None:
    _, make, shape, name, scale = differences.ROWS[row]
    expected = differences.right(make, shape, name, scale)
    assert differences.found(make, shape, name, scale) == expected
    assert expected in PAGE


def test_batch_normalisation_in_train_mode(differences: ModuleType) -> None:
    _, make, shape, name, scale = differences.ROWS[-1]
    assert make is differences.normalised
    assert differences.found(make, shape, name, scale).startswith("SampleMixingError")


def test_agreement_runs() -> None:
    agreement = importlib.import_module("benchmarks.agreement")
    table = agreement.layers()
    values = agreement.run(table["Conv2d groups"], "CrossEntropyLoss", "mean", "KFLR",
                           agreement.extensions()["KFLR"])  # fmt: skip
    assert agreement.deviation(values, values) == 0
    assert set(agreement.extensions()) >= {"BatchGrad", "KFAC", "PCHMP, abs"}
