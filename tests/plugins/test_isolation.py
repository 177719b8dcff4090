"""Sick plugins: core works with each of them installed, and the doctor names the culprit."""

from __future__ import annotations

import warnings

import pytest
import torch
from sick import DEADLY, ELSEWHERE, HALF, LINEAR, NORM, SCALE, SICK, Sick, loaded_here, one
from torch import nn

from backpack_core import backpack, extend, hookimpl, plugins, register, unregister
from backpack_core.cli import doctor, processes
from backpack_core.cli.doctor import Diagnosis, examine
from backpack_core.errors import (
    AutodiffFallbackWarning,
    BrokenPluginWarning,
    MissingPluginError,
    PluginError,
    PluginLoadError,
)
from backpack_core.plugins import registration
from backpack_core.plugins.registry import registry
from tests.distributions import FakeDistribution

CASES = pytest.mark.parametrize("sick", SICK.values(), ids=SICK.keys())


def install(fake_distribution: FakeDistribution, sick: Sick) -> None:
    for distribution in sick.distributions:
        fake_distribution(**distribution)


@CASES
def test_core_works(sick: Sick, fake_distribution: FakeDistribution) -> None:
    """Individual gradients of a linear layer, with a sound plugin next to the sick one."""
    install(fake_distribution, sick)
    fake_distribution(
        "backpack-plugin-sound",
        entry_points={"sound": "sound_module:SoundNorm"},
        modules={
            "sound_module": NORM.replace("GradNorm", "SoundNorm").replace("grad_n", "sound_n")
        },
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from backpack_core.extensions import BatchGrad, SoundNorm

        model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
        loss = lossfunc(model(torch.rand(4, 3)), torch.rand(4, 2))
        with backpack(BatchGrad(), SoundNorm()):
            loss.backward()
    assert torch.allclose(model.weight.grad_batch.sum(0), model.weight.grad)
    assert torch.allclose(model.weight.sound_norm, model.weight.grad_batch.flatten(1).norm(dim=1))
    broken = [w for w in caught if issubclass(w.category, BrokenPluginWarning)]
    assert bool(broken) == bool(sick.error)
    if sick.error:
        assert sick.error in str(broken[0].message)
        assert sick.who[:15] in str(broken[0].message)


@pytest.fixture
def only_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is really installed is blocked: quick, and the verdict is that of the fakes."""
    names = ",".join(f"backpack-plugin-{name}" for name in ("sick", "one", "two", "sound"))
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", names)
    monkeypatch.setattr(
        doctor, "SLOW", 2.0
    )  # so that a busy machine is not taken for a slow plugin


@pytest.mark.parametrize("name", SICK)
def test_doctor(
    name: str,
    fake_distribution: FakeDistribution,
    only_fakes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(fake_distribution, SICK[name])
    if name not in ELSEWHERE:
        monkeypatch.setattr(doctor, "load_isolated", loaded_here)
    check(examine(limit=60), SICK[name])


@pytest.mark.parametrize("sick", DEADLY.values(), ids=DEADLY.keys())
def test_doctor_survives(sick: Sick, fake_distribution: FakeDistribution, only_fakes: None) -> None:
    """Also plugins that come after the deadly one are examined."""
    install(fake_distribution, sick)
    fake_distribution(
        "backpack-plugin-sound",
        entry_points={"sound": "sound_module:GradNorm"},
        modules={"sound_module": NORM},
    )
    diagnosis = examine(limit=5)
    check(diagnosis, sick)
    (sound,) = (r for r in diagnosis.reports if r.distribution == "backpack-plugin-sound")
    assert sound.state == "loaded"
    assert [p.key for p in sound.provides] == ["GradNorm"]
    assert len(diagnosis.reports) == len(plugins.known_plugins())


def test_what_a_rule_names_may_print(fake_distribution: FakeDistribution, only_fakes: None) -> None:
    """It is imported for the report, and no plugin printed that."""
    source = LINEAR.format(spelling="chatty.Layer").replace("LinearRule", "ChattyRule")
    chatty = "import torch\nprint('hello')\nclass Layer(torch.nn.Module): pass\n"
    for name, modules, target in (
        ("one", {"one_module": source, "chatty": chatty}, "ChattyRule"),
        ("two", {"two_module": NORM}, "GradNorm"),
    ):
        points = {name: f"{name}_module:{target}"}
        fake_distribution(f"backpack-plugin-{name}", entry_points=points, modules=modules)
    diagnosis = examine(limit=60)
    assert [finding.problem for finding in diagnosis.findings] == []
    assert [r.output for r in diagnosis.reports if r.state == "loaded"][-2:] == ["", ""]


def test_a_machine_too_busy_to_start_is_no_fault_of_a_plugin(
    fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing hangs before a plugin was begun; a longer limit is a longer start, too."""
    fake_distribution(**one(NORM)[0])
    monkeypatch.setattr(processes, "START_LIMIT", 0.01)
    with pytest.raises(PluginError, match=r"did not start in 0\.02 s; --limit 0\.2 waits longer"):
        examine(limit=0.02)


SPEAKS = """
def well():
    return None

def ill():
    return "backpack-plugin-speaks", "it is old", "Buy a new one."

def broken():
    raise ValueError("rotten")
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("well", []),
        ("ill", [("warning", "backpack-plugin-speaks", "it is old", "Buy a new one.")]),
        (
            "broken",
            [
                (
                    "fault",
                    "other-speaks",
                    "its check of the installation fails (ValueError: rotten)",
                    "Update or uninstall other-speaks.",
                )
            ],
        ),
        (
            "missing",
            [
                (
                    "fault",
                    "other-speaks",
                    "its check of the installation fails (AttributeError: module 'speaks' has no "
                    "attribute 'missing')",
                    "Update or uninstall other-speaks.",
                )
            ],
        ),
    ],
)
def test_doctor_asks_distributions(
    name: str,
    expected: list[tuple[str, ...]],
    fake_distribution: FakeDistribution,
    only_fakes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "load_isolated", loaded_here)
    info = fake_distribution("other-speaks", modules={"speaks": SPEAKS})
    (info / "entry_points.txt").write_text(f"[backpack.doctor]\nspeaks = speaks:{name}\n")
    found = examine(limit=60).findings
    assert [(f.severity, f.who, f.problem, f.remedy) for f in found] == expected


@pytest.mark.parametrize(
    ("variable", "value", "entries"),
    [
        ("BACKPACK_BLOCK_PLUGINS", "sonud,sound", ["sonud"]),
        (
            "BACKPACK_PREFER",
            "*=backpack-plugin-sound,Norm=backpack-plugin-soud,sound",
            ["Norm=backpack-plugin-soud", "sound"],
        ),
    ],
)
def test_doctor_knows_names_in_the_environment(
    variable: str,
    value: str,
    entries: list[str],
    fake_distribution: FakeDistribution,
    only_fakes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_distribution(
        "backpack-plugin-sound",
        entry_points={"sound": "sound_module:GradNorm"},
        modules={"sound_module": NORM},
    )
    monkeypatch.setattr(doctor, "load_isolated", loaded_here)
    monkeypatch.setenv(variable, value)
    diagnosis = examine(limit=60)
    found = [(f.severity, f.who, f.problem) for f in diagnosis.findings]
    assert [(severity, who) for severity, who, _ in found] == [("warning", variable)] * len(entries)
    for entry, (_, _, problem) in zip(sorted(entries), sorted(found), strict=True):
        assert f"{entry!r} names no installed plugin" in problem


def check(diagnosis: Diagnosis, sick: Sick) -> None:
    assert len(diagnosis.findings) == 1, diagnosis.findings
    (finding,) = diagnosis.findings
    assert finding.who.startswith(sick.who)
    assert finding.severity == sick.severity
    assert sick.problem in finding.problem
    assert sick.remedy in finding.remedy
    assert diagnosis.healthy == (sick.severity == "warning")


def test_what_is_missing_is_chained_to_the_broken_plugin(
    fake_distribution: FakeDistribution,
) -> None:
    fake_distribution(**one("raise ValueError('rotten')")[0])
    with pytest.warns(BrokenPluginWarning, match=r"backpack-plugin-sick 0\.1"):
        plugins.ensure_loaded()
    with pytest.raises(MissingPluginError, match=r"'sick' of backpack-plugin-sick 0.1") as caught:
        from backpack_core.extensions import GradNorm  # noqa: F401
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert str(cause) == "rotten"
    traceback = cause.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert "sick_module" in traceback.tb_frame.f_code.co_filename


def test_a_layer_without_rule_is_chained_to_the_broken_plugin(
    fake_distribution: FakeDistribution,
) -> None:
    fake_distribution(
        "backpack-plugin-scale",
        entry_points={"scale": "scale_module:ScaleRule"},
        modules={"scale_module": "raise ValueError('rotten')"},
    )

    class ScaleModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    with pytest.warns(BrokenPluginWarning):
        from backpack_core.extensions import BatchGrad
    model, lossfunc = extend(ScaleModule()), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(4, 3)), torch.rand(4, 3))
    with (
        backpack(BatchGrad(fail_mode="error")),
        pytest.raises(MissingPluginError, match=r"backpack-plugin-scale 0\.1") as caught,
    ):
        loss.backward()
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_is_missing_names_what_is_blocked(
    fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPACK_BLOCK_PLUGINS", "backpack-plugin-layers")
    fake_distribution(**one("raise ValueError('rotten')")[0])
    with pytest.warns(BrokenPluginWarning):
        from backpack_core.extensions import BatchGrad, DiagGGNExact
    blocked = (
        r"backpack-plugin-layers [\d.]+ has a layer rule for (Linear|MSELoss), but is blocked: "
        "check BACKPACK_LOAD_PLUGINS"
    )
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(4, 3)), torch.rand(4, 2))
    with (
        pytest.warns(AutodiffFallbackWarning, match=blocked),
        backpack(DiagGGNExact()),
        pytest.raises(MissingPluginError, match=rf"no loss rule is known.*{blocked}"),
    ):
        loss.backward(retain_graph=True)
    with backpack(BatchGrad()):
        loss.backward()


def test_strict_raises_at_once(
    fake_distribution: FakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPACK_STRICT_PLUGINS", "1")
    fake_distribution(**one("raise ValueError('rotten')")[0])
    for _ in range(2):  # not only the first time
        with pytest.raises(PluginLoadError, match=r"backpack-plugin-sick 0\.1") as caught:
            extend(nn.Linear(1, 1))
        assert isinstance(caught.value.__cause__, ValueError)


def test_one_warning_for_a_distribution(fake_distribution: FakeDistribution) -> None:
    fake_distribution(
        "backpack-plugin-sick",
        entry_points={f"sick{i}": f"sick_module:Sick{i}" for i in range(5)},
        modules={"sick_module": "raise ValueError('rotten')"},
    )
    with pytest.warns(BrokenPluginWarning, match="'sick0', 'sick1'") as caught:
        extend(nn.Linear(1, 1))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extend(nn.Linear(1, 1))  # and only once


def test_registration_is_rolled_back(fake_distribution: FakeDistribution) -> None:
    fake_distribution(**one(HALF, "")[0])
    with pytest.warns(BrokenPluginWarning, match="no second one"):
        plugins.ensure_loaded()
    assert "Half" not in registry.extensions
    assert not registration.manager.has_plugin("backpack-plugin-sick:sick")


def test_a_rule_that_cannot_be_made_leaves_nothing() -> None:
    from backpack_core import LayerRule

    class Fine(nn.Module):
        pass

    class Sound(LayerRule):
        module_types = (Fine,)

        def _jac_t_mat_prod(self, view, mat):
            return mat

    class Unmade(Sound):
        def __init__(self) -> None:
            raise ValueError("not today")

    class Several:
        @staticmethod
        @hookimpl
        def backpack_layer_rules():
            return [Sound, Unmade]

    with pytest.raises(ValueError, match="not today"):
        register(Several, "several")
    assert Fine not in registry.rules
    with pytest.raises(PluginError, match="No plugin named 'several'"):
        unregister("several")


def test_a_plugin_may_use_the_extension_of_a_later_one(
    fake_distribution: FakeDistribution,
) -> None:
    """Whatever the order of the names."""
    derived = (
        "from backpack_core.extensions import {base}\n"
        "class {name}({base}):\n    savefield = '{name}'\n"
    )
    source = NORM.replace("GradNorm", "MiddleNorm").replace("grad_norm", "middle")
    fake_distribution(
        "backpack-plugin-chain",
        entry_points={
            "a": "chain_a:First",
            "m": "chain_m:MiddleNorm",
            "z": "chain_z:Last",
        },
        modules={
            "chain_a": derived.format(base="MiddleNorm", name="First"),
            "chain_m": source,
            "chain_z": derived.format(base="MiddleNorm", name="Last"),
        },
    )
    from backpack_core.extensions import First, Last, MiddleNorm

    assert issubclass(First, MiddleNorm)
    assert issubclass(Last, MiddleNorm)
    assert plugins.failures() == []


def test_scale_source_is_sound(fake_distribution: FakeDistribution) -> None:
    """The source the sick ones are made from works."""
    fake_distribution(
        "backpack-plugin-scale",
        entry_points={"scale": "scale_module:ScaleRule"},
        modules={"scale_module": SCALE},
    )
    from backpack_core.extensions import BatchGrad

    from scale_module import ScaleModule  # type: ignore[import-not-found]  # isort: skip

    model, lossfunc = extend(ScaleModule()), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(4, 3)), torch.rand(4, 3))
    with backpack(BatchGrad(fail_mode="error")):
        loss.backward()
    assert torch.allclose(model.weight.grad_batch.sum(0), model.weight.grad)
