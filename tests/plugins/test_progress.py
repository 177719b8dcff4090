"""Bars on a terminal for what takes long, and none elsewhere; who installs what, and with what."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backpack_core.cli import output
from backpack_core.cli.processes import load_isolated
from backpack_core.discovery import discover

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_a_bar_only_on_a_terminal(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert list(output.track([1, 2, 3], "Trying every layer")) == [1, 2, 3]
    assert ("Trying every layer" in stream.getvalue()) == stream.isatty()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_the_bar_of_the_doctor(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("BACKPACK_LOAD_PLUGINS", "backpack-plugin-firstorder")
    reports = load_isolated(discover(), 60)
    assert "loaded" in {report.state for report in reports}
    assert ("Loading plugins" in stream.getvalue()) == stream.isatty()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_the_bar_of_the_example(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    show = runpy.run_path(str(ROOT / "examples" / "retain_graph.py"))["show_progress"]
    monkeypatch.setattr(sys, "stderr", stream)
    for done in range(3):
        show("16 backward passes", done, 2)
    assert ("] 2/2" in stream.getvalue()) == stream.isatty()


def test_the_description_on_an_index_links_to_no_file() -> None:
    pytest.importorskip("hatchling")
    stand_alone = runpy.run_path(str(ROOT / "hatch_build.py"))["standing_alone"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/" in text
    links = re.findall(r"\]\(([^)]*)\)", stand_alone(text))
    assert all(link.startswith("https:") for link in links)
    assert stand_alone("a [word](x.md), [far](https://a.b)") == "a word, [far](https://a.b)"


def test_one_name_installs_the_families() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {"all", "cli", "testing", "transformers"} <= extras.keys()
    names = {
        tomllib.loads(path.read_text())["project"]["name"]
        for path in ROOT.glob("plugins/*/pyproject.toml")
    }
    assert {re.split(r"[><=]", line)[0] for line in extras["all"]} <= names
    assert len(extras["all"]) == 3


def test_every_distribution_has_links() -> None:
    for path in (ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")):
        if path.parent.parent.name in ("plugins", ROOT.name):
            urls = tomllib.loads(path.read_text())["project"]["urls"]
            assert all(url.startswith("https://") for url in urls.values())


def test_an_old_python_is_told_so(tmp_path: Path) -> None:
    """The guard of the Makefile, for another version than this one."""
    said = subprocess.run(
        ["make", "-n", "env", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'none'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    guard = re.search(r"-c '(.*?)'", said, re.DOTALL)
    assert guard is not None
    code = guard.group(1).replace("\\\n", " ")
    exec(code, {})
    with pytest.raises(SystemExit, match=r"needs Python 3\.99 or later"):
        exec(code.replace("(3, 11)", "(3, 99)").replace("3.11 or", "3.99 or"), {})
