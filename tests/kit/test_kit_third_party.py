"""A rule for a layer that torch does not have, as its author sees the kit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backpack_core.testing import check_case, temporary_plugin
from backpack_core.testing.checks import checks_for

PLUGIN = Path(__file__).parents[2] / "examples" / "plugins" / "backpack-plugin-rational"


def test_a_short_test_file_gets_the_full_set_of_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.syspath_prepend(str(PLUGIN / "tests"))
    import backpack_plugin_rational

    assert len((PLUGIN / "tests" / "test_rational.py").read_text("utf-8").splitlines()) <= 30
    with temporary_plugin(backpack_plugin_rational.RationalRule):
        import test_rational

        results = [result for case in test_rational.CASES for result in check_case(case)]
    assert [result for result in results if not result.ok] == []
    names = {result.check for result in results}
    # It is neither affine nor of zero Hessian nor of constant Jacobian, and mixes nothing.
    assert {check.name for check in checks_for("rule")} - names == {
        "affine_form",
        "affine_weight",
        "hessian_is_zero",
        "jacobian_is_constant",
        "mixing_is_refused",
        "not_twice_differentiable",
        "overwritten_input",
    }
    for name in ("backpack_plugin_rational", "test_rational"):
        sys.modules.pop(name)
