"""The conformance kit: one instance in, many separately named checks out.

A test file for a layer rule is a list of instances::

    from backpack_core.testing import RuleCase, parametrize_rule_checks

    @parametrize_rule_checks([RuleCase(lambda: MyLayer(4), lambda n: torch.randn(n, 4))])
    def test_conformance(check):
        check()

``LossCase`` and ``ExtensionCase`` work alike; ``check_rule`` and its relatives return results
instead of running under pytest. Needs ``pip install backpack-core[testing]`` and no configuration.
"""

from backpack_core.testing.cases import Arguments as Arguments
from backpack_core.testing.cases import ExtensionCase as ExtensionCase
from backpack_core.testing.cases import LossCase as LossCase
from backpack_core.testing.cases import RuleCase as RuleCase
from backpack_core.testing.cases import Tolerances as Tolerances
from backpack_core.testing.imports import check_import as check_import
from backpack_core.testing.isolation import only_plugins as only_plugins
from backpack_core.testing.isolation import temporary_plugin as temporary_plugin
from backpack_core.testing.network import LABELLED as LABELLED
from backpack_core.testing.oracle import Reference as Reference
from backpack_core.testing.quantities import Quantity as Quantity
from backpack_core.testing.quantities import register_quantity as register_quantity
from backpack_core.testing.runner import CheckResult as CheckResult
from backpack_core.testing.runner import check_extension as check_extension
from backpack_core.testing.runner import check_loss as check_loss
from backpack_core.testing.runner import check_rule as check_rule
from backpack_core.testing.runner import (
    parametrize_extension_checks as parametrize_extension_checks,
)
from backpack_core.testing.runner import parametrize_loss_checks as parametrize_loss_checks
from backpack_core.testing.runner import parametrize_rule_checks as parametrize_rule_checks
