"""Makes plugin packages from the shipped templates, and brings them up to date. Imports copier."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from backpack_core import __version__
from backpack_core.errors import BackpackError, UsageError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# Classes of these names would hide what the generated files import.
_TAKEN = {
    *("extension-case", "first-order-extension", "layer-rule", "module-call", "parametric"),
    *("quantity", "rule-case", "tensor"),
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
        name: Name of the plugin; ``backpack-plugin-`` is put in front where it is missing.
        folder: Where to put the package's folder.
        author: For licence and metadata.

    Returns:
        The folder of the package.

    Raises:
        UsageError: The name is not usable, or there is something already.
    """
    name = check_name(name)
    if not _AUTHOR.fullmatch(author):
        raise UsageError(f"The author has letters, digits and simple punctuation. Got {author!r}.")
    if not folder.is_dir():
        raise UsageError(f"There is no folder {str(folder)!r}.")
    target = folder / f"backpack-plugin-{name}"
    if target.exists():
        raise UsageError(f"{str(target)!r} exists already: choose another name, or move it away.")
    answers = {"kind": kind, "name": name} | ({"author": author} if author else {})
    source = published() if shutil.which("git") else shipped()
    _copier().run_copy(str(source), target, answers, defaults=True, quiet=True)
    return target


def check_name(name: str) -> str:
    """The name without ``backpack-plugin-``, as package indexes spell it.

    Raises:
        UsageError: It is no name of a package.
    """
    short = name.replace("_", "-").removeprefix("backpack-plugin-")
    if short in _TAKEN:
        raise UsageError(f"The generated package uses the name {name!r} itself: choose another.")
    if not _NAME.fullmatch(short):
        raise UsageError(
            "The name of a plugin has lower-case letters, digits and single hyphens, and starts "
            f"with a letter. Got {name!r}."
        )
    return short


def update(folder: Path) -> None:
    """Bring a package up to date with the installed templates; what its author wrote stays.

    Args:
        folder: The package, under version control and without uncommitted changes.

    Raises:
        UsageError: It was not made by ``backpack new``.
        BackpackError: What copier says is wrong.
    """
    if not (folder / ".copier-answers.yml").is_file():
        raise UsageError(f"{str(folder)!r} was not made by `backpack new`: no .copier-answers.yml.")
    published()
    try:
        _copier().run_update(folder, defaults=True, overwrite=True, quiet=True)
    except Exception as error:
        raise BackpackError(f"{type(error).__name__}: {error}") from error


def shipped() -> Path:
    """The templates: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "templates", package.parent / "templates"):
        if (folder / "copier.yml").is_file():
            return folder
    raise BackpackError("The templates are missing from this installation of backpack-core.")


def published() -> Path:
    """A Git repository of the shipped templates, with a tag for each release that was installed.

    ``copier update`` compares two states of a template, which it finds as tags of a repository. So
    each release adds its own to a repository in the user's cache.
    """
    repository = cache()
    if not (repository / ".git").is_dir():
        repository.mkdir(parents=True, exist_ok=True)
        _git(repository, "init", "--quiet")
    for path in repository.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(shipped(), repository, dirs_exist_ok=True)
    _git(repository, "add", "--all", "--force")
    if _git(repository, "status", "--porcelain"):
        _git(repository, "commit", "--quiet", "--no-verify", "--message", f"Release {__version__}")
        tags = set(_git(repository, "tag").split())
        names = (f"v{__version__}", *(f"v{__version__}.post{n}" for n in range(1, 1000)))
        _git(repository, "tag", next(name for name in names if name not in tags))
    return repository


def cache() -> Path:
    """Where the repository of templates is kept."""
    from platformdirs import user_cache_path

    return user_cache_path("backpack-core", appauthor=False) / "templates"


def _git(repository: Path, *arguments: str) -> str:
    command = [*_GIT, "-C", str(repository), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
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
