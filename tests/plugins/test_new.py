"""Generated packages: they pass their own tests, ruff and mypy, and can be brought up to date."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backpack_core import __version__
from backpack_core.cli import scaffold
from backpack_core.cli.app import app
from backpack_core.errors import BackpackError, UsageError
from backpack_core.plugins.registration import API_VERSION

KINDS = ("layer", "extension", "propagator")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "REPOSITORY", str(tmp_path / "cache" / "templates"))


@pytest.fixture(scope="session")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        arguments,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["x", "squared-exponential"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_complete_and_in_style(kind: str, name: str, tmp_path: Path) -> None:
    made = scaffold.create(kind, name, tmp_path, "A. Author")
    assert made == tmp_path / f"backpack-plugin-{name}"
    package = f"backpack_plugin_{name.replace('-', '_')}"
    files = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
    assert files == {
        ".copier-answers.yml",
        ".github/workflows/test.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        f"{package}/__init__.py",
        f"{package}/backpack-provides.json",
        f"{package}/py.typed",
        "tests/conftest.py",
        f"tests/test_{name.replace('-', '_')}.py",
    }
    (test,) = (made / "tests").glob("test_*.py")
    assert len(test.read_text().splitlines()) <= 30
    assert "A. Author" in (made / "LICENSE").read_text()
    for path in made.rglob("*"):
        assert not path.is_file() or "{{" not in path.read_text().replace("${{", "")
    run(sys.executable, "-m", "ruff", "check", ".", cwd=made)
    run(sys.executable, "-m", "ruff", "format", "--check", ".", cwd=made)


NEIGHBOUR = """
import torch
from backpack_core import LayerRule
from backpack_products import FirstOrderExtension
from backpack_products.operations import dense


class Labels(FirstOrderExtension):
    savefield = "labels"

    def read(self, product):
        raise RuntimeError("reads labels that there are not")


class Claim(LayerRule):
    module_types = ("torch.nn.Linear", "torch.nn.Identity")

    def _jac_t_mat_prod(self, view, mat):
        return mat
"""


def neighbours(site: Path) -> None:
    """Another plugin that fails on the kit's nets and claims a layer, and one that is broken."""
    (site / "neighbour.py").write_text(NEIGHBOUR)
    (site / "broken.py").write_text("raise ImportError('broken')")
    for name, values in (("neighbour", ("Labels", "Claim")), ("broken", ("X",))):
        folder = site / f"backpack_plugin_{name}-0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: backpack-plugin-{name}\nVersion: 0.1\n")
        lines = "".join(f"{name}{value} = {name}:{value}\n" for value in values)
        (folder / "entry_points.txt").write_text(f"[backpack]\n{lines}")


READS = """
import torch
from torch import Tensor, nn
from backpack_core import backpack, extend, quantities

model = extend(nn.Sequential(nn.Linear(3, 2)))
found: Tensor = quantities(model)["0.weight"].grad_batch
names: list[str] = list(quantities(model))
"""


def counted(said: str) -> str:
    return said.strip().splitlines()[-1].partition(" in ")[0]


# Each is a package with a test suite of its own. .ci/plugins tries one, and test_certificates.py,
# too.
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_its_tests_pass(kind: str, tmp_path: Path, mypy_cache: Path) -> None:
    """Installed from a wheel, next to the families only."""
    made = scaffold.create(kind, "made", tmp_path)
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-build-isolation", "--target", str(site), str(made), cwd=tmp_path)
    families = "backpack-plugin-layers,backpack-plugin-firstorder,backpack-plugin-secondorder"
    said = run(
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"),
        cwd=made,
        PYTHONPATH=str(site),
        BACKPACK_LOAD_PLUGINS=f"{families},backpack-plugin-made",
    )
    assert "passed" in said
    assert "skipped" not in said
    neighbours(site)
    alone = {k: v for k, v in os.environ.items() if k != "BACKPACK_LOAD_PLUGINS"}
    beside = subprocess.run(
        (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"),
        cwd=made,
        env=alone | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert counted(beside.stdout) == counted(said), beside.stdout
    # Beside it a script that reads quantities: torch's own types take eight seconds each time.
    (made / "reads.py").write_text(READS)
    run(
        *(sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(mypy_cache)),
        *("backpack_plugin_made", "tests", "reads.py"),
        cwd=made,
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../x",
        "import",
        "a/b",
        "a b",
        "A",
        "1a",
        "a--b",
        "a-",
        "a.b",
        "x;y",
        "{{x}}",
        "tensor",
        "none",
        "test-norm",
        "é",
    ],
)
def test_a_bad_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        scaffold.create("layer", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("author", ['"', "a\nb", "{{ x }}", "a/b"])
def test_a_bad_author_is_refused(author: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        scaffold.create("layer", "x", tmp_path, author)


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    scaffold.create("layer", "x", tmp_path)
    with pytest.raises(UsageError, match="exists already"):
        scaffold.create("layer", "x", tmp_path)
    with pytest.raises(UsageError, match="no folder"):
        scaffold.create("layer", "x", tmp_path / "missing")


@pytest.mark.parametrize(
    ("kind", "name"), [("layer", "linear"), ("layer", "layers"), ("extension", "batch-grad")]
)
def test_a_name_of_an_installed_plugin_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"backpack-plugin-\w+ .*is installed.* Choose another"):
        scaffold.create(kind, name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_prefix_may_be_given(tmp_path: Path) -> None:
    made = scaffold.create("layer", "backpack_plugin_x_y", tmp_path)
    assert made.name == "backpack-plugin-x-y"


def test_the_template_asks_for_this_release() -> None:
    major, minor, *_ = __version__.split(".")
    text = (scaffold.templates() / "package" / "pyproject.toml.jinja").read_text()
    assert f'"backpack-core>={major}.{minor},<{major}.{int(minor) + 1}"' in text
    text = (scaffold.templates() / "package" / "README.md.jinja").read_text()
    assert f"version {API_VERSION} of the plugin interface" in text


def commit(folder: Path) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    run("git", "init", "--quiet", cwd=folder)
    run("git", "add", "--all", cwd=folder)
    run(*git, "commit", "--quiet", "--message", "mine", cwd=folder)


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Installs a later release, with other templates."""
    folder = tmp_path / "later"
    shutil.copytree(scaffold.templates(), folder)
    for path, old, new in (
        ("package/README.md.jinja", "## Working on it", "## How to work on it"),
        ("package/pyproject.toml.jinja", "<0.2", "<0.3"),
        ("sources/layer.py.jinja", "A layer, and", "A new layer, and"),
    ):
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))
    for key, value in (("NAME", "a"), ("EMAIL", "a@b")):
        monkeypatch.setenv(f"GIT_AUTHOR_{key}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{key}", value)

    def install() -> None:
        monkeypatch.setattr(scaffold, "templates", lambda: folder)
        monkeypatch.setattr(scaffold, "__version__", "0.2.0")

    return install


@pytest.mark.parametrize("command", ["backpack", "copier"])
def test_update(command: str, tmp_path: Path, later: Callable[[], None]) -> None:
    """A later release changes the template: what is generated follows, what was written stays."""
    made = scaffold.create("layer", "x", tmp_path)
    source = made / "backpack_plugin_x" / "__init__.py"
    source.write_text('"""Mine."""\n')
    readme = made / "README.md"
    readme.write_text(readme.read_text() + "\n## My own section\n")
    commit(made)
    later()
    if command == "backpack":
        assert scaffold.update(made) == []
    else:
        scaffold.published()
        run(sys.executable, "-m", "copier", "update", "--defaults", cwd=made)

    assert "## How to work on it" in readme.read_text()
    assert "## My own section" in readme.read_text()
    assert "<0.3" in (made / "pyproject.toml").read_text()
    assert source.read_text() == '"""Mine."""\n'
    assert "_commit: v0.2.0" in (made / ".copier-answers.yml").read_text()


def test_update_names_conflicts(tmp_path: Path, later: Callable[[], None]) -> None:
    made = scaffold.create("layer", "x", tmp_path)
    readme = made / "README.md"
    readme.write_text(readme.read_text().replace("## Working on it", "## My heading"))
    commit(made)
    later()
    result = CliRunner().invoke(app, ["update", str(made)])
    assert result.exit_code == 1
    assert "conflict markers in README.md." in result.output
    assert "<<<<<<<" in readme.read_text()


def test_update_on_another_machine(
    tmp_path: Path, later: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package names no folder of its author's; the release it came from has to be known."""
    monkeypatch.setattr(scaffold, "REPOSITORY", "~/templates")
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path / "one"))
    made = scaffold.create("layer", "x", tmp_path)
    assert "_src_path: ~/templates" in (made / ".copier-answers.yml").read_text()
    commit(made)
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path / "two"))
    with monkeypatch.context() as patch:
        patch.setattr(scaffold, "__version__", "0.1.1")
        with pytest.raises(BackpackError, match=rf"templates of v{__version__}, .* Install that"):
            scaffold.update(made)
    assert scaffold.update(made) == []
    later()
    assert scaffold.update(made) == []
    assert "<0.3" in (made / "pyproject.toml").read_text()


def test_releases_side_by_side(
    tmp_path: Path, later: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two environments of one user: each makes packages of its own templates, with one tag each."""
    before, ours = scaffold.templates, f"v{__version__}"
    assert scaffold.published() == ours
    later()
    assert scaffold.published() == "v0.2.0"
    monkeypatch.setattr(scaffold, "templates", before)
    assert scaffold.published() == "v0.2.0.post1"  # in a checkout: no new version
    monkeypatch.setattr(scaffold, "__version__", __version__)
    made = scaffold.create("layer", "x", tmp_path)
    assert f"_commit: {ours}\n" in (made / ".copier-answers.yml").read_text()
    assert scaffold._tags() == {ours, "v0.2.0", "v0.2.0.post1"}


def test_update_needs_a_generated_package(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not made by"):
        scaffold.update(tmp_path)
    made = scaffold.create("layer", "x", tmp_path)
    with pytest.raises(BackpackError, match="git"):  # not under version control
        scaffold.update(made)


def test_without_git_it_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold.shutil, "which", lambda name: None)
    made = scaffold.create("extension", "x", tmp_path)
    assert (made / "backpack_plugin_x" / "__init__.py").is_file()
    with pytest.raises(UsageError, match="made without Git"):
        scaffold.update(made)


def test_update_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scaffold.create("layer", "x", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackpackError, match="needs Git"):
        scaffold.update(made)
