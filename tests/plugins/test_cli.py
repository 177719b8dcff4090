"""The ``backpack`` command, as a user runs it: output, exit codes, no colour in a pipe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from importlib_metadata import entry_points

from backpack_core.cli import doctor, main
from tests.distributions import write_distribution

from sick import NORM, SCALE  # isort: skip

COMMAND = "import sys; sys.argv[0] = 'backpack'; from backpack_core.cli import main; main()"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def backpack(
    *arguments: str, site: Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command with a folder of fake distributions, and nothing else allowed."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(site),
            "BACKPACK_LOAD_PLUGINS": "backpack-plugin-norm,backpack-plugin-scale",
            **environment,
        },
        cwd=cwd or site,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_plugins_lists_metadata_only(site: Path) -> None:
    """Not even torch is imported, nor a plugin that would hang."""
    (site / "torch.py").write_text("raise RuntimeError('slow')")
    write_distribution(
        site,
        "backpack-plugin-norm",
        version="1.2",
        entry_points={"norm": "norm_module:GradNorm"},
        modules={"norm_module": "while True: pass"},
    )
    result = backpack("plugins", site=site)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    (line,) = (line for line in lines if line.startswith("backpack-plugin-norm "))
    # Cells that are too narrow for their words go on in the next line.
    assert line.split()[:5] == ["backpack-plugin-norm", "1.2", "1", "extension", "or"]
    assert "propagator" in lines[lines.index(line) + 1]
    assert "not loaded" in line
    assert "\x1b" not in result.stdout
    assert any("blocked" in line.split() for line in result.stdout.splitlines())


def test_plugins_all_shows_what_they_provide(site: Path) -> None:
    for name, source, target in (
        ("norm", NORM, "GradNorm"),
        ("scale", SCALE, "ScaleRule"),
    ):
        write_distribution(
            site,
            f"backpack-plugin-{name}",
            entry_points={name: f"{name}_module:{target}"},
            modules={f"{name}_module": source},
        )
    result = backpack("plugins", "--all", "--json", site=site)
    assert result.returncode == 0, result.stderr
    loaded = {r["name"]: r for r in json.loads(result.stdout) if r["state"] == "loaded"}
    assert loaded["norm"]["provides"][0]["detail"] == "grad_norm"
    assert loaded["scale"]["provides"][0]["key"] == "scale_module.ScaleModule"


def here(
    *arguments: str,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plugins: str = "backpack-plugin-norm",
) -> tuple[Any, str, str]:
    """Run the command in this process: what it exits with, and its two outputs."""
    monkeypatch.chdir(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", plugins)
    monkeypatch.setattr(sys, "argv", ["backpack", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        (NORM, 0, "loaded"),
        ("raise SystemExit(3)", 1, "backpack-plugin-norm 0.1 (norm): SystemExit"),
    ],
    ids=["sound", "sick"],
)
def test_doctor_has_an_exit_code(
    source: str,
    code: int,
    says: str,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_distribution(
        site,
        "backpack-plugin-norm",
        entry_points={"norm": "norm_module:GradNorm"},
        modules={"norm_module": source},
    )
    (site / "nets.py").write_text("open('imported', 'w').close()")
    monkeypatch.setattr(doctor, "examine", cache(doctor.examine))
    run = partial(here, site=site, monkeypatch=monkeypatch, capsys=capsys)
    found, out, err = run("doctor")
    assert found == code, out + err
    assert says in out
    found, out, _ = run("doctor", "--json")
    assert found == code
    assert json.loads(out)["healthy"] == (code == 0)
    assert not (site / "imported").exists()  # code of the user's, which was not named


NETS = """
from torch import nn

def make():
    return nn.Linear(2, 2), nn.MSELoss()

number = 3
"""


def test_support_of_a_model(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """User code is imported where it is named, and nowhere else."""
    (site / "nets.py").write_text("open('imported', 'w').close()\n" + NETS)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    families = "backpack-plugin-layers,backpack-plugin-firstorder"
    run = partial(here, site=site, monkeypatch=monkeypatch, capsys=capsys, plugins=families)
    for arguments in (["plugins"], ["support", "--help"]):
        run(*arguments)
        assert not (site / "imported").exists()
    found, out, err = run("support", "nets:make", "-e", "BatchGrad", "--json")
    assert (found, (site / "imported").exists()) == (0, True), err
    linear, loss = json.loads(out)
    assert (linear["rule"], linear["BatchGrad"]) == ("LinearRule", "rule")
    assert (loss["type"], loss["BatchGrad"]) == ("MSELoss", "-")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nets", "package.module:function"),
        ("nets:make; import os", "package.module:function"),
        ("../nets:make", "package.module:function"),
        ("nowhere:make", "cannot be imported"),
        ("nets:missing", "has no attribute 'missing'"),
        ("nets:number", "cannot be called without arguments (TypeError: 3 is not"),
    ],
)
def test_support_of_nothing(
    target: str,
    says: str,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (site / "nets.py").write_text(NETS)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    run = partial(here, site=site, monkeypatch=monkeypatch, capsys=capsys)
    found, _, err = run("support", target, plugins="backpack-plugin-firstorder")
    assert found == 2
    assert says in err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["new", "layer", "--help"], ["doctor", "--help"]]
)
def test_help_shows_examples(arguments: list[str], site: Path) -> None:
    result = backpack(*arguments, site=site)
    assert result.returncode == 0
    assert "backpack" in result.stdout
    assert "\x1b" not in result.stdout
    if len(arguments) > 1:
        assert "Example" in result.stdout


def complete(words: str, site: Path, shell: str = "bash") -> list[str]:
    """What the shell offers for the last word. That imports neither torch nor a plugin."""
    (site / "torch.py").write_text("raise RuntimeError('slow')")
    result = backpack(
        site=site,
        _BACKPACK_COMPLETE=f"complete_{shell}",
        COMP_WORDS=words,
        COMP_CWORD=str(words.count(" ")),
        _TYPER_COMPLETE_ARGS=words,
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (
            "backpack ",
            ["plugins", "doctor", "support", "explain", "trouble", "update", "new", "certify"],
        ),
        ("backpack pl", ["plugins"]),
        ("backpack new ", ["layer", "extension", "propagator"]),
        ("backpack new e", ["extension"]),
        ("backpack doctor --", ["--json", "--limit", "--help"]),
        ("backpack new layer --o", ["--output"]),
        ("backpack support --extension GradN", ["GradNorm"]),
        ("backpack support nets:make -e KFAC -e GradN", ["GradNorm"]),
        ("backpack support -e Scale", [""]),  # a layer rule; files are left to the shell
    ],
)
def test_completion(words: str, offered: list[str], site: Path) -> None:
    write_distribution(
        site,
        "backpack-plugin-norm",
        entry_points={"norm": "norm_module:GradNorm", "scale": "norm_module:ScaleRule"},
        modules={"norm_module": "while True: pass"},
    )
    # Distributions that are installed may bring commands of their own.
    others = {point.name for point in entry_points(group="backpack.commands")}
    assert sorted({*complete(words, site)} - others) == sorted(offered)


def test_completion_explains_in_one_line_each(site: Path) -> None:
    """Where the shell shows what a command is for."""
    for words in ("backpack ", "backpack new ", "backpack plugins --", "backpack support --"):
        lines = complete(words, site, "fish")
        assert len(lines) > 2
        for line in lines:
            assert re.fullmatch(r"[\w-]+\t.+", line), line


def test_an_unknown_command_is_an_error(site: Path) -> None:
    assert backpack("levitate", site=site).returncode == 2


def test_without_the_extra_it_says_what_to_install(site: Path) -> None:
    (site / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')")
    result = backpack("plugins", site=site)
    assert result.returncode == 1
    assert "pip install 'backpack-core[cli]'" in result.stderr
    assert "Traceback" not in result.stderr
