"""Every extension of this repository says how it scales and how its values combine."""

from __future__ import annotations

import inspect

import pytest

from backpack.extensions import builtin
from backpack_core import Extension
from backpack_core.testing.quantities import installed_factories
from backpack_products.merging import UNDECLARED, declaration


def incumbents() -> list[Extension]:
    kinds = [getattr(builtin, n) for n in ("BatchGrad", "Variance", "KFAC", "KFLR", "KFRA", "HMP")]
    kinds += [
        getattr(builtin, n) for n in ("DiagGGNExact", "DiagGGNMC", "SqrtGGNMC", "DiagHessian")
    ]
    kinds += [builtin.BatchDiagGGNExact, builtin.SumGradSquared, builtin.BatchL2Grad]
    return [kind() for kind in kinds]


@pytest.mark.parametrize(
    "extension",
    [*[factory() for factory in installed_factories()], *incumbents()],
    ids=lambda e: f"{type(e).__module__}.{type(e).__name__}",
)
def test_is_declared(extension: Extension):
    own = [base for base in type(extension).__mro__ if "over_batches" in vars(base)]
    if inspect.getmodule(own[0]) is inspect.getmodule(Extension):
        assert "over_batches" in vars(extension), "nothing is declared"
    assert declaration(extension) is not UNDECLARED
    assert extension.degree is not None or "scale=" in extension.without_degree
