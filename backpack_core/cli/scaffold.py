"""Makes plugin packages from the shipped templates, and updates them. Needs copier."""

from __future__ import annotations

import itertools
import keyword
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from backpack_core import __version__
from backpack_core.cli.shipped import shipped
from backpack_core.errors import BackpackError, UsageError
from backpack_core.plugins import known_plugins

# A Git repository of templates. Packages record this path, and their authors use it on several
# machines. So it is relative to the home folder.
REPOSITORY = "~/.cache/backpack-core/templates"

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# Plugins whose classes would have names that Python keeps, or that the generated files import.
_TAKEN = {
    *("callable", "extension-case", "false", "first-order-extension", "none", "parametric"),
    *("quantity", "rule-case", "sample-product", "tensor", "true", "view"),
}
_AUTHOR = re.compile(r"[\w .,&()@+-]*")
_GIT = (
    *("git", "-c", "user.name=backpack-core", "-c", "user.email=backpack-core@localhost"),
    *("-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false", "-c", "core.autocrlf=false"),
)


def create(kind: str, name: str, folder: Path, author: str = "") -> Path:
    """Make a plugin package.

    Args:
        kind: ``"layer"``, ``"extension"`` or ``"propagator"``.
        name: Name of the plugin; ``backpack-plugin-`` is added if it is missing.
        folder: Where to put the package's folder.
        author: For licence and metadata.

    Returns:
        The folder of the package.

    Raises:
        UsageError: The name is invalid or taken, or the folder exists already.
    """
    name = check_name(name)
    _refuse_taken(kind, name)
    if not _AUTHOR.fullmatch(author):
        raise UsageError(f"The author has letters, digits and simple punctuation. Got {author!r}.")
    if not folder.is_dir():
        raise UsageError(f"There is no folder {str(folder)!r}.")
    target = folder / f"backpack-plugin-{name}"
    if target.exists():
        raise UsageError(f"{str(target)!r} exists already: choose another name, or move it away.")
    answers = {"kind": kind, "name": name} | ({"author": author} if author else {})
    if shutil.which("git"):
        source, release = REPOSITORY, published()
    else:
        source, release = str(templates()), None
    _copier().run_copy(source, target, answers, vcs_ref=release, defaults=True, quiet=True)
    return target


def check_name(name: str) -> str:
    """The name without ``backpack-plugin-``, normalised.

    Raises:
        UsageError: It is not a valid name of a package.
    """
    short = name.replace("_", "-").removeprefix("backpack-plugin-")
    if short in _TAKEN or short.startswith("test"):  # pytest takes such classes for tests
        raise UsageError(f"Python, pytest or the package uses the name {name!r}: choose another.")
    if not _NAME.fullmatch(short) or keyword.iskeyword(short):
        other = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[ .]+", "-", short).lower()
        hint = f": write {other!r}." if _NAME.fullmatch(other) and other != short else "."
        raise UsageError(
            "The name of a plugin has lower-case letters, digits and single hyphens, starts with "
            f"a letter, and is not a keyword of Python. Got {name!r}{hint}"
        )
    return short


def _refuse_taken(kind: str, name: str) -> None:
    """Raise an error if an installed plugin has the package's name: neither would load."""
    short = name.replace("-", "_")
    names = {short} if kind != "propagator" else {f"{short}_root", f"{short}_diagonal"}
    for installed in (plugin.provenance for plugin in known_plugins()):
        if installed.plugin in names or installed.distribution == f"backpack-plugin-{name}":
            raise UsageError(
                f"{installed} is installed and has an entry point {installed.plugin!r}, and two "
                "plugins with the same name are not loaded. Choose another name, such as one that "
                f"begins with yours: 'my-{name}'."
            )


def update(folder: Path) -> list[str]:
    """Update a package to the installed templates, and keep what its author wrote.

    Args:
        folder: The package, under version control and without uncommitted changes.

    Returns:
        The files in which author and templates changed the same lines: they have conflict markers.

    Raises:
        UsageError: It was not made by ``backpack new``.
        BackpackError: The templates that it was made from are not on this machine, or copier fails.
    """
    answers = folder / ".copier-answers.yml"
    text = answers.read_text(encoding="utf-8") if answers.is_file() else ""
    made_from = re.search(r"^_commit: (\S+)$", text, re.MULTILINE)
    if made_from is None:
        raise UsageError(
            f"{str(folder)!r} was not made by `backpack new`, or was made without Git: no "
            ".copier-answers.yml names the release that it was made from."
        )
    release = published()
    if made_from[1] not in _tags():
        raise BackpackError(
            f"{str(folder)!r} was made from the templates of {made_from[1]}, which were never used "
            "on this machine. Install that release of backpack-core and run `backpack update`, "
            "then do the same with this release."
        )
    try:
        _copier().run_update(folder, vcs_ref=release, defaults=True, overwrite=True, quiet=True)
    except Exception as error:
        raise BackpackError(f"{type(error).__name__}: {error}") from error
    return _git(folder, "diff", "--name-only", "--diff-filter=U", "--relative").splitlines()


def templates() -> Path:
    """The folder of the templates."""
    return shipped("templates/copier.yml", "templates/copier.yml").parent


def published() -> str:
    """Commit the shipped templates to :data:`REPOSITORY`, with a tag.

    ``copier update`` compares two versions of a template, which must be tags of a repository.

    Returns:
        The tag, which is named after this release. In a checkout, templates may change while the
        version does not: later tags get a number.
    """
    repository = _repository()
    if not (repository / ".git").is_dir():
        repository.mkdir(parents=True, exist_ok=True)
        _git(repository, "init", "--quiet")
    for path in repository.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(templates(), repository, dirs_exist_ok=True)
    _git(repository, "add", "--all", "--force")
    tags, last = _tags(), ""
    for number in itertools.count():
        name = f"v{__version__}" + (f".post{number}" if number else "")
        if name not in tags:
            break
        last = name
    if last and _git(repository, "rev-parse", f"{last}^{{tree}}") == _git(repository, "write-tree"):
        return last
    message = ("--message", f"Release {__version__}")
    _git(repository, "commit", "--quiet", "--no-verify", "--allow-empty", *message)
    _git(repository, "tag", name)
    return name


def _repository() -> Path:
    return Path(REPOSITORY).expanduser()


def _tags() -> set[str]:
    return set(_git(_repository(), "tag").split())


def _git(repository: Path, *arguments: str) -> str:
    command = [*_GIT, "-C", str(repository), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BackpackError("Updating packages needs Git, which is not installed.") from error
    if result.returncode:
        raise BackpackError(f"git {arguments[0]} failed: {result.stderr.strip()}")
    return result.stdout


def _copier() -> Any:
    try:
        import copier
    except ImportError as error:
        raise BackpackError(
            "Making packages needs copier. Run `pip install 'backpack-core[cli]'`."
        ) from error
    return copier
