"""Plugins that load slowly are found, and the module is named that takes the time."""

from __future__ import annotations

import pytest

from backpack_core.errors import UsageError
from backpack_core.testing import check_import, imports
from backpack_core.testing.compare import CheckFailure
from tests.distributions import FakeDistribution
from tests.distributions import fake_distribution as fake_distribution

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


@pytest.fixture
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters that start quickly, for plugins that need nothing."""
    start = "import torch, backpack_core.api, backpack_products.api\n"
    assert start in imports._SCRIPT
    monkeypatch.setattr(imports, "_SCRIPT", imports._SCRIPT.replace(start, ""))


def install(fake_distribution: FakeDistribution, **modules: str) -> None:
    modules = {"quick.rules": "import quick.tables", "quick.tables": "", "quick": "", **modules}
    points = {"first": "quick.rules:First", "second": "quick:Second"}
    fake_distribution("backpack-plugin-quick", entry_points=points, modules=modules)


@pytest.mark.parametrize(
    "name",
    [
        "backpack-plugin-layers",
        *(
            pytest.param(f"backpack-plugin-{family}", marks=pytest.mark.long)
            for family in ("firstorder", "secondorder", "transformers")
        ),
    ],
)
def test_our_own_load_quickly(name: str) -> None:
    check_import(name)


@pytest.mark.usefixtures("_without_torch")
@pytest.mark.parametrize("how", [BUSY, "import time\ntime.sleep(0.3)\n"])
def test_what_takes_long_is_named(
    how: str, fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "ATTEMPTS", 1)
    tables = "import other_library.parts"
    install(fake_distribution, **{"quick.tables": tables, "other_library.parts": how})
    with pytest.raises(CheckFailure, match=r"takes 0\.\d+ s, and 0\.2 s are allowed") as caught:
        check_import("backpack-plugin-quick", seconds=0.2)
    said = str(caught.value)
    assert "Most of it is other_library.parts, which quick.tables imports: do that when" in said


@pytest.mark.usefixtures("_without_torch")
def test_its_own_code_is_named(
    fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "ATTEMPTS", 1)
    install(fake_distribution, **{"quick.tables": BUSY})
    with pytest.raises(CheckFailure, match=r"Most of it is quick\.tables: do that when"):
        check_import("backpack_plugin_quick", seconds=0.2)


@pytest.mark.usefixtures("_without_torch")
def test_what_is_heavy_is_named_however_quick(fake_distribution: FakeDistribution) -> None:
    modules = {"quick.tables": "import between", "between": "import scipy", "scipy": ""}
    install(fake_distribution, **modules)
    with pytest.raises(CheckFailure, match=r"^quick\.tables imports scipy \(\d\.\d\d s\) when "):
        check_import("backpack-plugin-quick")
    check_import("backpack-plugin-quick", heavy=())


@pytest.mark.usefixtures("_without_torch")
def test_in_a_function_it_may_be_imported(fake_distribution: FakeDistribution) -> None:
    install(fake_distribution, **{"quick.tables": "def f():\n    import scipy\n", "scipy": BUSY})
    check_import("backpack-plugin-quick", seconds=0.2)


def test_one_quick_attempt_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0.9, 0.8, 0.1]
    monkeypatch.setattr(imports, "_imported", lambda *of: (taken.pop(0), set(), []))
    check_import("backpack-plugin-layers", seconds=0.2)
    assert taken == []


@pytest.mark.usefixtures("_without_torch")
def test_what_cannot_be_measured(fake_distribution: FakeDistribution) -> None:
    with pytest.raises(UsageError, match=r"has no entry point in .* that is installed"):
        check_import("backpack-plugin-nobody")
    install(fake_distribution, **{"quick.tables": "raise ImportError('broken')"})
    with pytest.raises(CheckFailure, match="cannot be loaded: ImportError: broken"):
        check_import("backpack-plugin-quick")
