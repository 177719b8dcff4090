"""What plugins say they provide, beside their code: it is true, and names who is missing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backpack_checks import providers
from backpack_core import backpack, discovery, extend
from backpack_core.cli import provides
from backpack_core.cli.certificate import PROVIDES, beside
from backpack_core.cli.inspection import report
from backpack_core.errors import AutodiffFallbackWarning, MissingPluginError, UsageError
from backpack_core.extensions import BatchGrad
from backpack_core.plugins import ensure_loaded, known_plugins
from backpack_core.testing import RuleCase, check_case
from tests.distributions import FakeDistribution

ROTTEN = "raise ValueError('rotten')"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


NAME = f"{Scaled.__module__}.Scaled"
RULE = f"""
from backpack_products import ParametricRule
class ScaledRule(ParametricRule):
    module_types = ({NAME!r},)
    params = linear_in_params = ("weight",)
    hessian_is_zero = True
    def _jac_t_mat_prod(self, view, mat):
        return mat * view.parameter("weight")
    def _param_jac_t_mat_prod(self, view, name, mat):
        return (mat * view.inputs[0]).sum(-1, keepdim=True)
"""


def ask(module: nn.Module, **settings: Any) -> None:
    model, lossfunc = extend(module), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(4, 3)), torch.rand(4, 3))
    with backpack(BatchGrad(**settings)):
        loss.backward()


@pytest.fixture
def scaled(fake_distribution: FakeDistribution) -> Path:
    """The file of a plugin that fails, and does not resemble what it provides."""
    info = fake_distribution(
        "backpack-plugin-other",
        entry_points={"other": "other_module:ScaledRule"},
        modules={"other_module": ROTTEN},
    )
    file = next(info.parent.rglob("other_module.py"))
    text = json.dumps({NAME: "other_module:ScaledRule", "Fancy": "other_module:Fancy"})
    beside(file, PROVIDES).write_text(text)
    return file


@pytest.mark.filterwarnings("ignore::backpack_core.errors.BrokenPluginWarning")
def test_a_broken_plugin_is_named_among_others(
    scaled: Path, fake_distribution: FakeDistribution
) -> None:
    fake_distribution(
        "backpack-plugin-a",
        entry_points={"scaled": "a_module:Scaled"},
        modules={"a_module": "raise ValueError('something else')"},
    )
    with pytest.raises(MissingPluginError, match="'other' of backpack-plugin-other") as caught:
        ask(Scaled(), fail_mode="error")
    assert "may provide" not in str(caught.value)
    assert str(caught.value.__cause__) == "rotten"
    with pytest.raises(MissingPluginError, match=r"extension named 'Fancy'.*'other' of backpack"):
        _ = __import__("backpack_core.extensions").extensions.Fancy


def test_a_blocked_plugin_is_named(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPACK_BLOCK_PLUGINS", "other")
    text = r"backpack-plugin-other 0\.1 has a layer rule for Scaled, but is blocked: check BACKPACK"
    with pytest.raises(MissingPluginError, match=text):
        ask(Scaled(), fail_mode="error")
    with pytest.warns(AutodiffFallbackWarning, match=text):
        ask(Scaled())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"backpack-plugin-else": [NAME, "Fancy"], "backpack-plugin-layers": [NAME]}
    monkeypatch.setattr(providers, "our_plugins", lambda: known)
    text = r"backpack-plugin-else has a layer rule for Scaled: pip install backpack-plugin-else\."
    with pytest.raises(MissingPluginError, match=text) as caught:
        ask(Scaled(), fail_mode="error")
    assert "plugin-layers" not in str(caught.value)  # it is installed, and says otherwise


def test_a_class_that_computes_something_else_is_told_apart() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    text = "has a layer rule for Linear, but it is not used for a class .* that computes something"
    with pytest.warns(AutodiffFallbackWarning, match=text):
        ask(Doubled(3, 3))


def test_a_rule_that_is_declared_and_not_registered_is_told(
    scaled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author misspelt the class in ``module_types``."""
    scaled.write_text(RULE.replace(NAME, f"{NAME}d"))
    text = (
        r"backpack-plugin-other 0\.1 declares a layer rule for Scaled, but has none: `backpack doc"
    )
    with pytest.warns(AutodiffFallbackWarning, match=text):
        ask(Scaled())
    with pytest.raises(
        UsageError, match=r"No rule speaks for Scaled: .* 0\.1 declares a layer rule"
    ):
        check_case(RuleCase(Scaled, lambda n: torch.randn(n, 3)))


@pytest.mark.parametrize("text", ["", "[]", '{"Fancy": 1}', "\x00"])
def test_a_damaged_file_says_nothing(scaled: Path, text: str) -> None:
    beside(scaled, PROVIDES).write_text(text)
    assert not providers.declared_by("other_module")
    assert not [*providers.providers_of("Fancy")]


def test_what_is_not_true_is_a_broken_promise(scaled: Path) -> None:
    scaled.write_text(RULE)
    said = dict.fromkeys([NAME, "torch.nn.modules.linear.Bilinear"], "other_module:ScaledRule")
    beside(scaled, PROVIDES).write_text(json.dumps(said))
    ensure_loaded()
    (plugin,) = [p for p in known_plugins() if p.name == "other"]
    assert provides.provided_by([plugin]) == {
        "other_module": {f"{__name__}.Scaled": "other_module:ScaledRule"}
    }
    (told,) = [text for text in report(plugin).broken_promises if "says that" in text]
    assert "it provides torch.nn.modules.linear.Bilinear, but it does not" in told


def test_files_of_this_repository_are_up_to_date() -> None:
    """``python plugins/make_provides.py`` writes them."""
    generator = runpy.run_path(str(Path(__file__).parents[2] / "plugins" / "make_provides.py"))
    written = generator["files"](discovery.our_plugins()).items()
    old = [path.parent.name for path, text in written if path.read_text("utf-8") != text]
    assert not old, "run python plugins/make_provides.py"
    names = discovery.our_plugins()
    assert "KFAC" in names["backpack-plugin-secondorder"]
    assert "torch.nn.modules.linear.Linear" in names["backpack-plugin-layers"]
