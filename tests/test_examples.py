"""The examples run, and agree with autograd (they exit with an error where they do not)."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def single_precision():
    """The examples are written for torch's defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "name",
    [
        *("demo", "extension_hook", "custom_module", "laplace_two_moons", "natural_gradient"),
        pytest.param("private_digits", marks=pytest.mark.long),
        pytest.param("private_adapters", marks=pytest.mark.long),
    ],
)
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.long
def test_retain_graph(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))  # its worker processes import it by name
    import retain_graph

    results = retain_graph.main(["--size", "16", "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert results[0][2] > 2 * results[-1][2], "64 passes take less memory than one"
    assert "All diagonals agree." in capsys.readouterr().out
