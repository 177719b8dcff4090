"""The conformance kit: from one case, many checks, each with its own name.

A test file for a layer rule is a list of cases::

    from backpack_core.testing import RuleCase, parametrize_checks

    @parametrize_checks([RuleCase(lambda: MyLayer(4), lambda n: torch.randn(n, 4))])
    def test_conformance(check):
        check()

``LossCase`` and ``ExtensionCase`` work alike; ``check_case`` returns results, without pytest.
Needs ``pip install backpack-core[testing]`` and no configuration.
"""

import backpack_products.conformance  # noqa: F401 - its checks
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
from backpack_core.testing.runner import check_case as check_case
from backpack_core.testing.runner import parametrize_checks as parametrize_checks
