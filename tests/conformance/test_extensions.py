"""The conformance kit, applied to every installed extension."""

from __future__ import annotations

from backpack_core.plugins import ensure_loaded
from backpack_core.registry import registry
from backpack_core.testing import ExtensionCase, parametrize_extension_checks
from backpack_core.testing.extensions_run import installed_factories

CASES = [ExtensionCase(factory) for factory in installed_factories()]


@parametrize_extension_checks(CASES)
def test_extension(check):
    check()


def test_every_installed_extension_is_checked():
    ensure_loaded()
    assert {type(case.extension_factory()).__name__ for case in CASES} == set(registry.extensions)
