"""What ``backpack support`` and ``explain`` say of a user's model, and of one that does not run."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backpack_core.cli.app import app
from backpack_core.cli.explain import HEADER, explained
from backpack_core.cli.output import print_table
from backpack_core.cli.support import classes, table_of_model, table_of_rules
from backpack_core.cli.trouble import trouble
from backpack_core.errors import MissingPluginError, UsageError

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return x * self.weight

def net():
    return nn.Sequential(nn.Linear(3, 4), Own(), nn.Linear(4, 2))

def own():
    return net(), nn.CrossEntropyLoss(), torch.randn(5, 3), torch.randint(2, (5,))

def as_list():
    return [*own()]

def other_shape():
    return net(), nn.CrossEntropyLoss(), torch.randn(5, 4), torch.randint(2, (5,))

def no_target():
    return net(), nn.CrossEntropyLoss(), torch.randn(5, 4)

def other_target():
    return net(), nn.CrossEntropyLoss(), torch.randn(5, 3), torch.rand(5)

def frozen():
    return nn.Linear(3, 2).requires_grad_(False), *own()[1:]

def function():
    return net(), F.cross_entropy, *own()[2:]

def loss_first():
    return nn.CrossEntropyLoss(), net()
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_of_factories.py").write_text(NETS)
    (tmp_path / "broken_factories.py").write_text("def make(:\n")
    (tmp_path / "raising_factories.py").write_text("raise OSError('no data')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "nets_of_factories", raising=False)


@pytest.mark.parametrize("factory", ["own", "as_list"])
def test_what_the_run_computes_is_not_refused(factory: str) -> None:
    """Without a run, nobody knows whether operations have the structure of Kronecker factors."""
    table = table_of_model(f"nets_of_factories:{factory}", ("KFAC",))
    assert [row.cells["KFAC"].kind for row in table] == ["fast", "autodiff", "fast", "rule"]
    rows = explained(f"nets_of_factories:{factory}", ("KFAC",)).rows
    assert {row.parameter: row.form for row in rows}["1.weight"] == "where operations use it"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nets_of_factories:other_shape", "mat1 and mat2 shapes cannot be multiplied"),
        ("nets_of_factories:no_target", "mat1 and mat2 shapes cannot be multiplied"),
        ("nets_of_factories:other_target", "loss(model(*inputs), target).backward() must work"),
        ("nets_of_factories:frozen", "does not require grad"),
        ("nets_of_factories:function", "Got Sequential, function, Tensor, Tensor."),
        ("nets_of_factories:loss_first", "CrossEntropyLoss, which nets_of_factories:loss_first"),
        ("broken_factories:make", "cannot be imported: SyntaxError: invalid syntax"),
        ("raising_factories:make", "cannot be imported: OSError: no data"),
        ("nets_of_factory:own", "did you mean 'nets_of_factories'?"),
    ],
    ids=lambda text: text.partition(":")[2] if text.partition(":")[2].isidentifier() else "",
)
def test_what_does_not_run_is_said_in_a_sentence(target: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        explained(target, ("BatchGrad",))
    assert says in str(caught.value)
    assert "tensor(" not in str(caught.value)


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", "backpack-checks")
    for chosen in (("BatchGrad",), ()):
        with pytest.raises(UsageError) as caught:
            classes(chosen)
        assert "extension named 'BatchGrad'. Loaded: none. backpack-plugin" in str(caught.value)
        assert "but is blocked: check BACKPACK_LOAD_PLUGINS" in str(caught.value)


def test_a_table_without_layers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", "backpack-plugin-firstorder")
    with pytest.raises(MissingPluginError, match=r"layers of torch\.nn, .* rule for Linear, but"):
        table_of_rules(("BatchGrad",))


def test_the_doctor_says_what_may_block_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", "backpack-plugin-layer")
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "blocked. Check BACKPACK_LOAD_PLUGINS, BACKPACK_BLOCK_PLUGINS" in " ".join(said.split())


@pytest.mark.parametrize("arguments", [("certify", "--wheel", "no.whl"), ("update", "nowhere")])
def test_a_path_that_does_not_exist_is_said_at_once(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ("AttributeError: 'Parameter' object has no attribute 'kfac'", "The attribute exists only"),
        ("NotExtended Error", "Nothing was computed in a block"),
    ],
    ids=["attribute", "words"],
)
def test_the_entry_that_has_most_of_the_words(said: str, begins: str) -> None:
    assert begins in trouble(said)


def test_no_word_of_a_table_is_broken() -> None:
    first = ("weight", "LinearRule of backpack-plugin-layers 0.1.0", "formed", "1.5×", "8×", "")
    second = ("slope", "Rule of backpack-plugin-gate 0.1.0", "DenseProduct", "?", "?", "none " * 9)
    with redirect_stdout(StringIO()) as printed:
        print_table(HEADER, [first, second], 90)
    words = " ".join((*HEADER, *first, *second)).split()
    assert {*printed.getvalue().split()} == {*words}


def test_a_long_reason_is_said_once() -> None:
    result = CliRunner().invoke(app, ["explain", "nets_of_factories:own", "-e", "KFRA"])
    text = " ".join(result.output.split())
    assert text.count("freeze the parameter") == 1
    assert text.count("see 1") == 5
