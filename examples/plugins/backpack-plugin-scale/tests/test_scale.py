"""Compares the rule with automatic differentiation. One case for each configuration."""

from collections.abc import Callable

import torch
from backpack_core.testing import RuleCase, check_import, parametrize_checks

from backpack_plugin_scale import ScaleModule

CASES = [
    RuleCase(ScaleModule, lambda n: torch.randn(n, 4), name="vectors"),
    RuleCase(ScaleModule, lambda n: torch.randn(n, 2, 1, 2), name="images"),
    RuleCase(lambda: ScaleModule(0.0), lambda n: torch.randn(n, 1), name="weight zero"),
]


@parametrize_checks(CASES)
def test_conformance(check: Callable[[], None]) -> None:
    """One test for each check of each case."""
    check()


def test_import() -> None:
    """It loads quickly, and imports nothing heavy for that."""
    check_import("backpack-plugin-scale")
