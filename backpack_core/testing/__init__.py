"""The conformance kit: one instance in, many separately named checks out.

A test file for a layer rule is a list of instances::

    from backpack_core.testing import RuleCase, parametrize_rule_checks

    @parametrize_rule_checks([RuleCase(lambda: MyLayer(4), lambda n: torch.randn(n, 4))])
    def test_conformance(check):
        check()

``LossCase`` and ``ExtensionCase`` work alike; ``check_rule`` and its relatives return results
instead of running under pytest. Needs ``pip install backpack-core[testing]`` and no configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backpack_core.testing.cases import Arguments as Arguments
    from backpack_core.testing.cases import ExtensionCase as ExtensionCase
    from backpack_core.testing.cases import LossCase as LossCase
    from backpack_core.testing.cases import RuleCase as RuleCase
    from backpack_core.testing.cases import Tolerances as Tolerances
    from backpack_core.testing.decorators import (
        parametrize_extension_checks as parametrize_extension_checks,
    )
    from backpack_core.testing.decorators import parametrize_loss_checks as parametrize_loss_checks
    from backpack_core.testing.decorators import parametrize_rule_checks as parametrize_rule_checks
    from backpack_core.testing.promise import KIT_VERSION as KIT_VERSION
    from backpack_core.testing.quantities import Quantity as Quantity
    from backpack_core.testing.quantities import register_quantity as register_quantity
    from backpack_core.testing.reference import Reference as Reference
    from backpack_core.testing.runner import CheckResult as CheckResult
    from backpack_core.testing.runner import check_extension as check_extension
    from backpack_core.testing.runner import check_loss as check_loss
    from backpack_core.testing.runner import check_rule as check_rule

# Loaded when they are asked for: pytest imports this package in every run, for its plugin.
_HOMES = {
    "cases": "Arguments ExtensionCase LossCase RuleCase Tolerances",
    "decorators": ("parametrize_extension_checks parametrize_loss_checks parametrize_rule_checks"),
    "promise": "KIT_VERSION",
    "quantities": "Quantity register_quantity",
    "reference": "Reference",
    "runner": "CheckResult check_extension check_loss check_rule",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME_OF)
