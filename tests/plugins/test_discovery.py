"""What is found, blocked and preferred, before anything is imported."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from sick import LINEAR, NORM
from torch import nn

import backpack_core
from backpack_core import extend, plugins
from backpack_core.discovery import Plugin
from backpack_core.errors import BrokenPluginWarning, MissingPluginError, PluginConflictError
from backpack_core.plugins import loading
from backpack_core.plugins.registry import registry
from backpack_core.preferences import choose
from backpack_core.testing.isolation import reset, temporary_plugin
from tests.distributions import FakeDistribution, write_distribution

NORM_POINT = {"norm": "norm_module:GradNorm"}
NORM_MODULE = {"norm_module": NORM}


def found(name: str) -> Plugin:
    (plugin,) = (p for p in plugins.known_plugins() if p.name == name)
    return plugin


def test_listing_imports_nothing(fake_distribution: FakeDistribution) -> None:
    fake_distribution(
        "backpack-plugin-norm", version="2.1", entry_points=NORM_POINT, modules=NORM_MODULE
    )
    plugin = found("norm")
    assert (plugin.distribution, plugin.version) == ("backpack-plugin-norm", "2.1")
    assert (plugin.value, plugin.state) == ("norm_module:GradNorm", "not loaded")
    assert "norm_module" not in sys.modules


@pytest.mark.parametrize("value", ["norm_module", "norm_module:GradNorm", "norm_module : GradNorm"])
@pytest.mark.parametrize("extras", ["", "[more]", " [more, most]"])
def test_extras_of_an_entry_point_are_left_out(
    fake_distribution: FakeDistribution, value: str, extras: str
) -> None:
    fake_distribution(
        "backpack-plugin-norm", entry_points={"norm": value + extras}, modules=NORM_MODULE
    )
    plugin, kind = found("norm"), "GradNorm" if ":" in value else ""
    assert (plugin.package, plugin.attribute) == ("norm_module", kind)
    assert plugin.find().__name__ == (kind or "norm_module")


def test_loading_is_lazy_until_extend(fake_distribution: FakeDistribution) -> None:
    fake_distribution("backpack-plugin-norm", entry_points=NORM_POINT, modules=NORM_MODULE)
    assert "norm_module" not in sys.modules
    extend(nn.Linear(1, 1))
    assert "norm_module" in sys.modules
    assert found("norm").state == "loaded"


@pytest.mark.parametrize(
    ("variable", "value", "loads"),
    [
        ("BACKPACK_LOAD_PLUGINS", "", False),
        ("BACKPACK_LOAD_PLUGINS", "other", False),
        ("BACKPACK_LOAD_PLUGINS", "other, norm", True),
        ("BACKPACK_LOAD_PLUGINS", "backpack_plugin_Norm", True),
        ("BACKPACK_BLOCK_PLUGINS", "", True),
        ("BACKPACK_BLOCK_PLUGINS", "norm", False),
        ("BACKPACK_BLOCK_PLUGINS", "backpack-plugin-norm", False),
    ],
)
def test_the_lists_of_the_environment(
    variable: str,
    value: str,
    loads: bool,
    fake_distribution: FakeDistribution,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    fake_distribution("backpack-plugin-norm", entry_points=NORM_POINT, modules=NORM_MODULE)
    plugins.ensure_loaded()
    assert found("norm").state == ("loaded" if loads else "blocked")
    assert ("norm_module" in sys.modules) == loads
    if not loads:
        with pytest.raises(ImportError, match=r"plugin-norm 0\.1 has the .* GradNorm, .*blocked"):
            from backpack_core.extensions import GradNorm  # noqa: F401


def test_the_block_list_wins(
    fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", "norm")
    monkeypatch.setenv("BACKPACK_BLOCK_PLUGINS", "norm")
    fake_distribution("backpack-plugin-norm", entry_points=NORM_POINT, modules=NORM_MODULE)
    assert found("norm").state == "blocked"


@pytest.mark.parametrize(
    ("listed", "allowed"), [("first", "abc"), ("Backpack.plugin_b", "bc"), ("third", "c"), ("", "")]
)
def test_libraries_of_what_is_listed_are_allowed(
    listed: str, allowed: str, fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly and through others; not the distributions that require it, nor those of an extra."""
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", listed)
    requires = {
        "a": ("backpack_plugin_b>=0.1",),
        "b": ("Backpack.Plugin.C (>=0.1)", "torch"),
        "c": ("backpack-plugin-d; extra == 'more'",),
        "d": (),
    }
    for (which, needed), name in zip(
        requires.items(), ("first", "second", "third", "torch"), strict=True
    ):
        distribution = f"backpack-plugin-{which}"
        fake_distribution(distribution, entry_points={name: "gone:Gone"}, requires=needed)
    mine = [p for p in plugins.known_plugins() if p.value == "gone:Gone"]
    assert {p.distribution[-1] for p in mine if p.state == "not loaded"} == {*allowed}


def test_the_first_release_on_the_path_counts(
    fake_distribution: FakeDistribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older release further back has an entry point that the visible one has no more."""
    write_distribution(
        tmp_path / "behind", "backpack-plugin-norm", entry_points={"old": "gone:Old"}
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "behind")])
    fake_distribution(
        "backpack-plugin-norm", version="2.0", entry_points=NORM_POINT, modules=NORM_MODULE
    )
    mine = [p for p in plugins.known_plugins() if p.distribution == "backpack-plugin-norm"]
    assert [(p.name, p.version) for p in mine] == [("norm", "2.0")]


def test_metadata_that_cannot_be_parsed_is_left_alone(fake_distribution: FakeDistribution) -> None:
    info = fake_distribution("backpack-plugin-norm", entry_points=NORM_POINT)
    (info / "entry_points.txt").write_text("[backpack]\n\tno equals sign")
    reset()
    assert "norm" not in {p.name for p in plugins.known_plugins()}


def test_what_an_interrupted_removal_left(fake_distribution: FakeDistribution) -> None:
    """A folder without metadata is known by its name."""
    info = fake_distribution("backpack-plugin-norm", entry_points=NORM_POINT, modules=NORM_MODULE)
    (info / "METADATA").unlink()
    reset()
    plugin = found("norm")
    assert (plugin.distribution, plugin.version) == ("backpack-plugin-norm", "")
    plugins.load(plugin)
    assert plugin.state == "loaded"


def test_what_was_left_does_not_rival_what_was_installed_since(
    fake_distribution: FakeDistribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = fake_distribution("backpack-plugin-norm", entry_points=NORM_POINT, modules=NORM_MODULE)
    (info / "METADATA").unlink()
    write_distribution(
        tmp_path / "since", "backpack-plugin-norm", version="2.0", entry_points=NORM_POINT
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "since")])
    reset()
    assert (found("norm").version, found("norm").state) == ("2.0", "not loaded")


SAME = [
    ("backpack-plugin-a", "a_module:GradNorm"),
    ("backpack-plugin-b", "b_module:GradNorm"),
]


@pytest.fixture
def same_name(fake_distribution: FakeDistribution) -> None:
    for distribution, value in SAME:
        module = value.partition(":")[0]
        fake_distribution(distribution, entry_points={"norm": value}, modules={module: NORM})


def test_two_of_one_name_are_a_conflict(same_name: None) -> None:
    with pytest.warns(BrokenPluginWarning, match="Several plugins claim the name 'norm'"):
        plugins.ensure_loaded()
    assert "a_module" not in sys.modules
    assert "b_module" not in sys.modules
    with pytest.raises(MissingPluginError, match="GradNorm") as caught:
        from backpack_core.extensions import GradNorm  # noqa: F401
    assert isinstance(caught.value.__cause__, PluginConflictError)
    assert "backpack-plugin-a 0.1 and backpack-plugin-b 0.1" in str(caught.value)


def test_a_preference_settles_it_at_once(same_name: None) -> None:
    with pytest.warns(BrokenPluginWarning):
        plugins.ensure_loaded()
    for wanted in ("b", "a"):  # and may be changed
        backpack_core.prefer(f"backpack-plugin-{wanted}", "norm")
        from backpack_core import extensions

        assert extensions.GradNorm.__module__ == f"{wanted}_module"


@pytest.mark.parametrize("value", ["norm=backpack-plugin-b", "*=backpack_plugin_b", "x=y,norm=b"])
def test_the_environment_settles_it(
    value: str, same_name: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPACK_PREFER", value)
    reset()
    if value.endswith("=b"):  # no distribution of this name: still a conflict
        assert {p.state for p in plugins.known_plugins() if p.name == "norm"} == {"conflict"}
        return
    plugins.ensure_loaded()
    from backpack_core.extensions import GradNorm

    assert GradNorm.__module__ == "b_module"


@pytest.fixture
def same_key(fake_distribution: FakeDistribution) -> type[nn.Module]:
    for which, spelling in (
        ("a", "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"),
        ("b", "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"),
    ):
        source = LINEAR.format(spelling=spelling)
        fake_distribution(
            f"backpack-plugin-{which}",
            entry_points={f"lin_{which}": f"{which}_module:LinearRule"},
            modules={f"{which}_module": source},
        )
    return nn.modules.linear.NonDynamicallyQuantizableLinear


def test_two_rules_for_a_layer_are_a_conflict_when_it_is_used(same_key: type[nn.Module]) -> None:
    extend(nn.Linear(1, 1))
    with pytest.raises(
        PluginConflictError, match=r"backpack-plugin-a 0\.1 and backpack-plugin-b 0\.1"
    ):
        extend(same_key(1, 1))


@pytest.mark.parametrize("key", ["class", "name", "everything"])
def test_a_preference_chooses_the_rule(same_key: type[nn.Module], key: str) -> None:
    name = f"{same_key.__module__}.{same_key.__qualname__}"
    keys = {"class": (same_key,), "name": (name,), "everything": ()}[key]
    for wanted in ("b", "a"):
        backpack_core.prefer(f"backpack-plugin-{wanted}", *keys)
        plugins.ensure_loaded()
        resolved = registry.resolve(same_key(1, 1))
        assert resolved.provenance.distribution == f"backpack-plugin-{wanted}"


@pytest.mark.parametrize("seed", range(5))
def test_order_changes_nothing(
    seed: int, fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order on disk and of loading: the same rules, extensions and conflicts."""
    names = [f"p{i}" for i in range(6)]
    random.Random(seed).shuffle(names)
    for name in names:
        fake_distribution(
            f"backpack-plugin-{name}",
            entry_points={
                f"{name}_norm": f"{name}_module:Norm{name.upper()}",
                f"{name}_rule": f"{name}_rules:LinearRule",
            },
            modules={
                f"{name}_module": NORM.replace("GradNorm", f"Norm{name.upper()}"),
                f"{name}_rules": LINEAR.format(spelling=f"torch.nn.Layer{int(name[1]) // 2}"),
            },
        )
    installed = plugins.known_plugins()
    random.Random(seed).shuffle(installed)
    plugins.ensure_loaded()
    assert set(registry.extensions) >= {f"NormP{i}" for i in range(6)}
    for i in range(3):
        claims = registry.rules[f"torch.nn.Layer{i}"]
        assert {c.provenance.plugin for c in claims} == {f"p{2 * i}_rule", f"p{2 * i + 1}_rule"}
        key = f"torch.nn.Layer{i}"
        with pytest.raises(PluginConflictError, match="Several plugins") as caught:
            choose(claims, key, "layer rule")
        assert "is preferred" not in str(caught.value)
        backpack_core.prefer("backpack-plugin-misspelt", key)
        with pytest.raises(PluginConflictError, match="'backpack-plugin-misspelt' is preferred"):
            choose(claims, key, "layer rule")
        backpack_core.prefer(f"backpack-plugin-p{2 * i}", key)
        assert choose(claims, key, "layer rule").provenance.plugin == f"p{2 * i}_rule"


def test_two_threads_see_all_plugins(fake_distribution: FakeDistribution) -> None:
    """The second waits until the first has loaded everything."""
    import threading

    fake_distribution(
        "backpack-plugin-norm",
        entry_points=NORM_POINT,
        modules={"norm_module": f"import time\ntime.sleep(0.3)\n{NORM}"},
    )
    seen: list[bool] = []

    def use() -> None:
        extend(nn.Linear(1, 1))
        seen.append("GradNorm" in registry.extensions)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 3


def test_an_unknown_extension_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from backpack_core import extensions

    monkeypatch.setattr(loading, "_plugins", [])
    monkeypatch.setattr(loading, "_loaded", True)
    registry.extensions.clear()
    text = r"'BatchGrad'\. Loaded: none\. backpack-plugin-firstorder has .*: pip install backpack"
    with pytest.raises(ImportError, match=text):
        extensions.BatchGrad  # noqa: B018
    with pytest.raises(ImportError, match="pip install backpack-plugin-secondorder"):
        extensions.KFAC  # noqa: B018
    with pytest.raises(ImportError, match=r"No loaded plugin provides .* 'Unheard'"):
        extensions.Unheard  # noqa: B018
    with pytest.raises(AttributeError):
        extensions.unheard  # noqa: B018


def test_register_by_hand() -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Rule(backpack_core.LayerRule):
        module_types = (Mine,)

        def _jac_t_mat_prod(self, view, mat):
            return mat

    assert backpack_core.register(Rule, "mine") is Rule
    assert str(registry.resolve(Mine()).provenance) == "'mine' (registered by hand)"
    with pytest.raises(PluginConflictError, match="registered already, as 'mine'"):
        backpack_core.register(Rule, "again")
    backpack_core.unregister("mine")
    assert registry.resolve(Mine()).is_fallback
    with temporary_plugin(Rule):
        assert not registry.resolve(Mine()).is_fallback
    assert registry.resolve(Mine()).is_fallback
