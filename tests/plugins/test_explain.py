"""``backpack support``, ``explain`` and ``plugins``: what they promise, and that it fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backpack_core import unregister
from backpack_core.cli import listing, trouble
from backpack_core.cli.app import app
from backpack_core.cli.counts import Layer, work
from backpack_core.cli.explain import Row, explained
from backpack_core.cli.support import table_of_model, table_of_rules
from backpack_core.errors import MissingPluginError, PluginError, UsageError

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(36))
    def forward(self, x):
        return x * self.weight

class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)
    @staticmethod
    def backward(ctx, grad):
        return grad * torch.cos(*ctx.saved_tensors)

class Mixed(nn.Sequential):
    def forward(self, x):
        return Sine.apply(super().forward(x))

def data():
    return torch.randn(8, 1, 5, 5), torch.randint(3, (8,))

def make():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), Own(), nn.Linear(36, 3))
    return net, nn.CrossEntropyLoss(), *data()

def plain():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    return net, nn.CrossEntropyLoss(), *data()

def norm():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.MSELoss()

def wrapped():
    return Mixed(nn.Flatten(), nn.Linear(25, 3)), nn.CrossEntropyLoss(), *data()

def fails():
    return nn.Linear({}["size"], 2)

def needs(argument):
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_to_explain.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "nets_to_explain", raising=False)


def test_reasons_of_a_model() -> None:
    report = table_of_model("nets_to_explain:norm", ("BatchGrad",))
    norm = report[1].as_json()
    assert norm["BatchGrad"] == "refused"
    assert "influence each other" in norm["reasons"]["BatchGrad"]


def test_what_the_run_refuses_is_not_promised() -> None:
    report = table_of_model("nets_to_explain:wrapped", ("DiagHessian", "BatchGrad"))
    linear = report[1].as_json()
    assert (linear["DiagHessian"], linear["BatchGrad"]) == ("refused", "rule")
    assert "Sine" in linear["reasons"]["DiagHessian"]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: table_of_model("torch.nn:Linear"), UsageError, "cannot be called without arg"),
        (
            lambda: table_of_model("nets_to_explain:needs"),
            UsageError,
            "missing a required argument: 'argument'",
        ),
        (lambda: table_of_model("nets_to_explain:fails"), UsageError, "raised KeyError: 'size'"),
        (lambda: table_of_model("nets_to_explain:fails"), UsageError, "nets_to_explain.py:"),
        (lambda: table_of_model("torch.nn:Linaer"), UsageError, "did you mean 'Linear'?"),
        (
            lambda: table_of_rules(("KFACC",)),
            UsageError,
            "extension named 'KFACC': did you mean 'KFAC'?",
        ),
        (lambda: explained("nets_to_explain:make", ("Kfac",)), UsageError, "did you mean 'KFAC'?"),
        (lambda: unregister("Nobody"), PluginError, "No plugin named 'Nobody'"),
        (
            lambda: __import__("backpack_core.extensions").extensions.BatchGrd,
            MissingPluginError,
            "did you mean 'BatchGrad'?",
        ),
    ],
    ids=[
        "class",
        "arguments",
        "raises",
        "line",
        "attribute",
        "support",
        "explain",
        "unregister",
        "import",
    ],
)
def test_near_misses(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)


def rows(factory: str, *names: str) -> dict[str, Row]:
    found = explained(f"nets_to_explain:{factory}", names).rows
    return {f"{row.quantity} {row.parameter}" if names[1:] else row.parameter: row for row in found}


def test_explain() -> None:
    row = rows("plain", "KFAC")["3.weight"]
    assert row.rule.startswith("LinearRule of backpack-plugin-layers")
    assert (row.form, row.faster) == ("AffineProduct, contracted", "")
    layer = Layer(1, 36, 3, 1, 111, False)
    assert row.multiply_adds == 1 + (work(layer, "KFAC", 1) or 0) / (3 * layer.product)
    assert row.bytes == (36**2 + 3**2) / 108
    row = rows("make", "KFAC")["3.weight"]
    assert (row.rule, row.form) == ("automatic", "where operations use it")


def test_explain_says_what_would_be_faster() -> None:
    found = rows("make", "BatchGrad", "DiagGGNExact")
    assert found["BatchGrad 3.weight"].rule == "automatic"
    assert "install a plugin with a rule for Own" in found["BatchGrad 3.weight"].faster
    assert found["BatchGrad 4.weight"].bytes == 8  # as many gradients as samples
    assert "one column" in found["DiagGGNExact 4.weight"].faster
    of_one, exact = (found[f"{name} 0.weight"] for name in ("BatchGrad", "DiagGGNExact"))
    assert (exact.multiply_adds or 0) > (of_one.multiply_adds or 0) > 1


def test_explain_counts_the_columns_of_the_root() -> None:
    layer = Layer(1, 36, 3, 1, 111, False)  # a root of the loss has a column less than classes
    expected = 1 + (work(layer, "DiagGGNExact", 2) or 0) / (3 * layer.product)
    assert rows("plain", "DiagGGNExact")["3.weight"].multiply_adds == expected


def invoke(*arguments: str, width: int | None = None) -> str:
    env = {"COLUMNS": None if width is None else str(width)}
    result = CliRunner(env=env).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_explain_of_several_has_numbers() -> None:
    options = ("explain", "nets_to_explain:plain", "-e", "KFAC", "-e", "BatchGrad", "-e", "KFAC")
    found = json.loads(invoke(*options, "--json"))
    assert [row["quantity"] for row in found] == ["KFAC"] * 4 + ["BatchGrad"] * 4
    assert all(isinstance(r["bytes"], float) for r in found if r["parameter"].endswith("weight"))
    assert {row["bytes"] for row in found if row["parameter"].endswith("bias")} == {None}
    text = invoke(*options)
    assert "\nBatchGrad\nparameter" in text
    assert "8.00×" in text
    assert "×: as many as the gradient takes" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "nets_to_explain:plain", "-e", "KFAC"),
        ("support", "nets_to_explain:norm", "-e", "BatchGrad"),
        ("plugins",),
        ("trouble", "NotExtendedError"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_forty_columns(arguments: tuple[str, ...]) -> None:
    text = invoke(*arguments, width=40)
    long = [line for line in text.splitlines() if len(line) > 40]
    assert all(line.startswith("    ") for line in long)  # code is not broken
    words = set(re.findall(r"\w+", invoke(*arguments, width=300)))
    assert set(re.findall(r"\w+", text)) <= words  # nor is a word


@pytest.mark.parametrize(
    "name",
    [
        *("samplemixingerror", "SAMPLEMIXINGERROR:", "x.SampleMixingError", "mixing"),
        "backpack_core.errors.SampleMixingError: BatchNorm1d '1' makes every sample",
    ],
)
def test_trouble_in_any_case(name: str) -> None:
    text = invoke("trouble", name)
    assert text.startswith("SampleMixingError\n\nSamples of the batch influence each other")
    assert "    with backpack(BatchGrad()):\n" in text


@pytest.mark.parametrize(
    "said", ["'Parameter' object has no attribute 'grad_batch'", "grad_batch", "attribute"]
)
def test_trouble_with_an_attribute(said: str) -> None:
    text = invoke("trouble", said)
    title, _, entry = text.split("\n", 2)
    assert title == "'Parameter' object has no attribute 'grad_batch'"
    assert entry.startswith("The attribute exists only after a backward pass")
    assert "\n2. Another field." in text


def test_trouble_with_what_is_not_there() -> None:
    with pytest.raises(UsageError, match="is called 'SamplMixngErr': did you mean 'SampleMixi"):
        trouble.trouble("SamplMixngErr")
    with pytest.raises(UsageError, match="Several entries contain 'plugin': PluginError, Plugin"):
        trouble.trouble("plugin")


def test_trouble_without_a_name_lists_all() -> None:
    assert invoke("trouble").splitlines() == [*trouble.entries()]


def test_trouble_has_one_space_and_one_blank_line() -> None:
    for entry in trouble.entries().values():
        text = "\n".join(line for line in trouble.plain(entry, 40) if not line.startswith("    "))
        assert not re.search(r"\S  +\S", text), text
    assert "\n\n\n" not in invoke("trouble", "mixing")


def test_trouble_has_no_markdown() -> None:
    for name in trouble.entries():
        lines = list(trouble.plain(trouble.entries()[name], 80))
        text = "\n".join(line for line in lines if not line.startswith("    "))
        assert not re.search(r"`|\*\*|\]\(|\.md|^#", text), text
        assert all(len(line) <= 80 for line in lines if not line.startswith("    "))


def test_explain_on_the_command_line() -> None:
    text = invoke("explain", "nets_to_explain:make", "-e", "KFAC")
    assert "multiply-adds" in text
    assert max(map(len, text.splitlines())) <= 100


def test_plugins_are_folded() -> None:
    reports = listing.collect(False, 1.0)
    lines = listing.folded(reports)
    found = {line[0]: line[2] for line in lines}
    own = [report for report in reports if report.distribution == "backpack-plugin-layers"]
    assert found["backpack-plugin-layers"] == f"{len(own)} rules"
    assert len(lines) < 10 < len(listing.rows(reports))


def test_the_plan_of_a_pass_is_shown() -> None:
    result = CliRunner().invoke(app, ["explain", "nets_to_explain:plain", "-e", "KFAC"])
    assert result.exit_code == 0, result.output
    assert result.output.endswith(
        "step  at                what happens\n"
        "1     CrossEntropyLoss  send to 2 by its rule\n"
        "2     Linear '3'        read weight, bias; send to 3 by its rule\n"
        "3     Flatten '2'       send to 4 by its rule\n"
        "4     ReLU '1'          send to 5 by its rule\n"
        "5     Conv2d '0'        read weight, bias\n"
    )


def test_without_data_there_is_no_plan() -> None:
    result = CliRunner().invoke(app, ["explain", "nets_to_explain:norm", "-e", "BatchGrad"])
    text = "The steps of a pass follow if the factory returns a model, a loss, inputs and a target."
    assert text in " ".join(result.output.split())


def test_what_is_not_counted_is_explained() -> None:
    result = CliRunner().invoke(app, ["explain", "nets_to_explain:plain", "-e", "DiagGGNExact"])
    assert result.exit_code == 0, result.output
    assert "\n?: not counted. Weights of affine layers are" in result.output


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("batchgrad", "BatchGrad"),
        ("batchGrad", "BatchGrad"),
        ("kfac", "KFAC"),
        ("Kfac", "KFAC"),
        ("KFACC", "KFAC"),
        ("diag_ggn_exact", "DiagGGNExact"),
        ("Batch_Grad", "BatchGrad"),
    ],
)
def test_near_misses_of_extensions(name: str, near: str) -> None:
    with pytest.raises(ImportError, match=f"did you mean '{near}'") as caught:
        exec(f"from backpack_core.extensions import {name}")
    assert "is not used for" not in str(caught.value)
    assert not hasattr(__import__("backpack_core.extensions").extensions, "pytest_plugins")
