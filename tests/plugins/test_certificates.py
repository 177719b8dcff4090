"""Certificates: who gets one, what it is for, and when it no longer holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import importlib_metadata
import pytest
from typer.testing import CliRunner

from backpack_core import errors
from backpack_core.cli import certificate, listing, scaffold
from backpack_core.cli.app import app
from backpack_core.cli.certificate import Certificate, digest, file_of, read, version_of
from backpack_core.cli.certify import certify, into_wheels, project
from backpack_core.cli.doctor import _certificates
from backpack_core.cli.hatch import Certify
from backpack_core.discovery import discover
from backpack_core.errors import BackpackError, UsageError
from backpack_core.plugins import loading
from tests.distributions import FakeDistribution

from sick import NORM  # isort: skip


def text_of(made: Certificate) -> str:
    return certificate.json_of(asdict(made))


@pytest.fixture(autouse=True)
def forget() -> None:
    certificate.standing.cache_clear()


def made_for(home: Path, **changed: Any) -> Certificate:
    versions = {"kit": version_of("backpack-core"), "torch": version_of("torch")}
    fields = {"code": digest(home), **versions, **changed}
    return Certificate(
        "backpack-plugin-norm", checks={"norm": {"mean": "passed"}}, worst={}, **fields
    )


@pytest.fixture
def norm(fake_distribution: FakeDistribution) -> Path:
    """The file of a plugin that is installed."""
    name = "backpack-plugin-norm"
    points = {"norm": "norm_module:GradNorm"}
    info = fake_distribution(name, entry_points=points, modules={"norm_module": NORM})
    return next(info.parent.rglob("norm_module.py"))


def standing() -> str:
    certificate.standing.cache_clear()
    (report,) = [r for r in listing.collect(False, 1.0) if r.name == "norm"]
    return report.standing


def test_it_holds_for_its_code_and_versions(norm: Path) -> None:
    assert standing() == "no certificate"
    file_of(norm).write_text(text_of(made_for(norm)))
    assert standing() == "certified"
    file_of(norm).write_text(text_of(made_for(norm, torch="1.9.0")))
    assert standing() == "other versions"
    (finding,) = [f for f in _certificates(listing.collect(False, 1.0)) if "norm" in f.who]
    assert "other versions of backpack-core or torch" in finding.problem
    file_of(norm).write_text(text_of(made_for(norm)))
    norm.write_text(NORM + "\n# another line\n")
    assert standing() == "code changed"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 2}', "\x00"])
def test_what_is_not_a_certificate_is_said(norm: Path, text: str) -> None:
    file_of(norm).write_text(text)
    assert standing() == "unreadable"


def test_versions_of_a_wrong_kind_are_said(norm: Path) -> None:
    file_of(norm).write_text(text_of(made_for(norm, torch=2)))
    assert standing() == "unreadable"


@pytest.mark.parametrize("word", ["1", "true"])
def test_only_the_certified_load(norm: Path, monkeypatch: Any, word: str) -> None:
    monkeypatch.setenv("BACKPACK_REQUIRE_CERTIFIED", word)

    def state() -> str:
        certificate.standing.cache_clear()
        return next(p.state for p in discover() if p.name == "norm")

    assert state() == "blocked"
    file_of(norm).write_text(text_of(made_for(norm, code="sha256:0")))
    assert state() == "blocked"
    file_of(norm).write_text(text_of(made_for(norm)))
    assert state() == "not loaded"


def test_without_a_gate_nothing_gets_in(norm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPACK_REQUIRE_CERTIFIED", "1")
    file_of(norm).write_text(text_of(made_for(norm)))
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda **_: [])
    assert {plugin.state for plugin in discover()} == {"blocked"}


def test_a_missing_quantity_names_the_switch(norm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPACK_REQUIRE_CERTIFIED", "1")
    with pytest.raises(errors.MissingPluginError, match="BACKPACK_REQUIRE_CERTIFIED"):
        _ = __import__("backpack_core.extensions").extensions.GradNorm


def test_core_alone_says_what_is_there_and_blocked(
    norm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPACK_REQUIRE_CERTIFIED", "1")
    monkeypatch.setattr(loading, "ADVISERS", loading.ADVISERS[:1])
    home = "backpack-plugin-firstorder"
    own = rf"Gone\. Install it\. Installed, but blocked: {home} [\d.]+; check BACKPACK_LOAD_PLUGINS"
    assert re.match(own, str(loading.missing("Gone.", "BatchGrad", " Install it.")))
    assert re.search(r"blocked: (\S+ \S+, ){3}\d more; check", str(loading.missing("", "GradNorm")))
    monkeypatch.setattr(loading, "_plugins", [])
    assert str(loading.missing("", "BatchGrad")) == f" {home} has it: pip install {home}."


@pytest.fixture(params=["layer"])
def package(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A generated package, and metadata as if it were installed."""
    monkeypatch.setattr(scaffold.shutil, "which", lambda name: None)
    made = scaffold.create(request.param, "proved", tmp_path)
    folder = tmp_path / "site" / "backpack_plugin_proved-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: backpack-plugin-proved\nVersion: 0.1.0\n")
    points = project(made).entry_points
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (folder / "entry_points.txt").write_text(f"[backpack]\n{lines}")
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return made


def wheel_of(package: Path) -> Path:
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*command, "--wheel-dir", "dist", "."], cwd=package, check=True)
    return next((package / "dist").glob("*.whl"))


@pytest.mark.parametrize(
    "package",
    ["extension", *(pytest.param(k, marks=pytest.mark.long) for k in ("layer", "propagator"))],
    indirect=True,
)
def test_a_package_proves_itself(package: Path) -> None:
    """From its tests to a wheel that holds what they found."""
    told = certificate.beside(package / "backpack_plugin_proved", certificate.PROVIDES)
    as_made = told.read_text()
    wheel = wheel_of(package)
    told.write_text('{"torch.nn.Linear": "backpack_plugin_proved:Other"}')
    result = CliRunner().invoke(app, ["certify", str(package), "--wheel", str(wheel)])
    assert result.exit_code == 0, (result.output, result.exception)
    home = package / "backpack_plugin_proved"
    found = read(file_of(home))
    assert found is not None
    assert found.code == digest(home)
    assert found.checks
    assert json.loads(told.read_text()) == json.loads(as_made)
    assert not found.unchecked
    assert "No case builds" not in result.output
    assert f"in {'2 cases' if len(found.checks) == 2 else '1 case'}." in result.output
    assert 0 < found.worst["error"] <= found.worst["allowed"]
    with zipfile.ZipFile(wheel) as file:
        inside = file.read(f"backpack_plugin_proved/{certificate.NAME}")
        assert inside == file_of(home).read_bytes()
        said = json.loads(file.read(f"backpack_plugin_proved/{certificate.PROVIDES}"))
        assert said == json.loads(as_made)
        record = file.read("backpack_plugin_proved-0.1.0.dist-info/RECORD").decode()
        assert sorted(line.partition(",")[0] for line in record.split()) == sorted(file.namelist())
    hook: Any = SimpleNamespace(root=str(package), target_name="wheel")
    data: dict[str, Any] = {"force_include": {}}
    Certify.initialize(hook, "standard", data)  # the certificate is there, so nothing is run
    names = [f"backpack_plugin_proved/{name}" for name in (certificate.NAME, certificate.PROVIDES)]
    assert list(data["force_include"].values()) == names
    source = home / "__init__.py"
    source.write_text(source.read_text() + "\n# changed\n")
    other = {file_of(home): Certificate(**{**json.loads(inside), "code": digest(home)})}
    with pytest.raises(UsageError, match="contains code other than that certified"):
        into_wheels(wheel, other)
    with pytest.raises(UsageError, match="contains code other than that certified"):
        into_wheels(wheel.parent, other)
    (wheel.parent / "backpack_plugin_proved-0.2.0-py3-none-any.whl").touch()
    with pytest.raises(UsageError, match="has 2 wheels of backpack-plugin-proved, not one"):
        into_wheels(wheel.parent, other)


@pytest.mark.long
def test_a_package_that_fails_gets_none(package: Path) -> None:
    (test,) = (package / "tests").glob("test_*.py")
    checks = test.read_text()
    test.write_text("def test_nothing():\n    assert False\n")
    with pytest.raises(
        BackpackError, match=r"No certificate was written for \S+proved, because tests fail"
    ):
        certify(package)
    test.write_text("def test_nothing():\n    pass\n")
    with pytest.raises(UsageError, match="No check of the kit ran for a class of"):
        certify(package)
    test.write_text(checks.replace("    check()", '    __import__("pytest").skip()'))
    with pytest.raises(UsageError, match="No check of the kit ran for a class of"):
        certify(package)
    assert not file_of(package / "backpack_plugin_proved").exists()


def test_a_wrong_group_is_named(package: Path, tmp_path: Path) -> None:
    file = package / "pyproject.toml"
    file.write_text(file.read_text().replace("entry-points.backpack]", "entry-points.backpacks]"))
    with pytest.raises(UsageError) as caught:
        project(package)
    assert "no entry point in [project.entry-points.backpack]" in str(caught.value)
    assert "There is [project.entry-points.backpacks]" in str(caught.value)
    with pytest.raises(UsageError, match=r"no pyproject\.toml"):
        project(tmp_path)
