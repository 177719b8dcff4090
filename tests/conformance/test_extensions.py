"""The conformance kit, applied to every installed extension."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from backpack_core.extensions import PCHMP
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.testing import ExtensionCase, parametrize_checks
from backpack_core.testing.quantities import installed_factories
from backpack_secondorder.oracles import positive_curvature_product

CASES = [ExtensionCase(factory) for factory in installed_factories()]
# The other settings that have a formula of their own.
OTHERS = [
    ExtensionCase(
        partial(PCHMP, modify="abs"), positive_curvature_product(torch.abs), name="PCHMP, abs"
    ),
]


@pytest.mark.grid(8)
@parametrize_checks([*CASES, *OTHERS])
def test_extension(check):
    check()


def test_every_installed_extension_is_checked():
    ensure_loaded()
    assert {type(case.extension_factory()).__name__ for case in CASES} == set(registry.extensions)
