"""What the conformance kit found about a package, kept beside its code. Imports nothing heavy.

A certificate is a JSON file in the package, so that every build backend can ship it and everybody
can read it without an import. It says which code was checked, by its digest: whoever reads it sees
whether that is the code that is installed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from importlib_metadata import PackageNotFoundError, version

from backpack_core import __version__

NAME = "backpack-certificate.json"
FORMAT = 1

Standing = Literal["certified", "no certificate", "code changed", "other versions", "unreadable"]


@dataclass(frozen=True)
class Certificate:
    """What was checked, and with what.

    Attributes:
        distribution: Name of the distribution.
        code: Digest of the package's code, see :func:`digest`.
        kit: Version of backpack-core, which holds the kit.
        torch: Version of torch.
        checks: By case the checks that ran, each with ``"passed"`` or ``"expected failure"``.
        worst: The comparison in double precision that came closest to what is allowed: which it
            was, its relative error, and what is allowed.
        unchecked: Entry points whose classes no case built.
        format: Of this file.
    """

    distribution: str
    code: str
    kit: str
    torch: str
    checks: dict[str, dict[str, str]]
    worst: dict[str, Any]
    unchecked: list[str] = field(default_factory=list)
    format: int = FORMAT

    @property
    def number(self) -> int:
        """How many checks ran."""
        return sum(map(len, self.checks.values()))

    def text(self) -> str:
        """The file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def standing(self, code: str) -> Standing:
        """Whether it holds for some code with the versions that are installed.

        Args:
            code: Digest of the code.
        """
        if code != self.code:
            return "code changed"
        installed = _minor(__version__), _minor(version_of_torch())
        return (
            "certified" if installed == (_minor(self.kit), _minor(self.torch)) else "other versions"
        )


def home_of(module: str) -> Path | None:
    """The folder of a package, or the file of a module; ``None`` if there is none. No import."""
    try:
        spec = find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return file.parent if spec.submodule_search_locations else file


def place(home: Path) -> Path:
    """Where the certificate of a package, or of a single module, is."""
    return home / NAME if home.is_dir() else home.with_suffix(f".{NAME}")


def digest(home: Path) -> str:
    """A number for all code of a package; the same on every system.

    Args:
        home: The folder of the package, or the file of a module.
    """
    files = sorted(home.rglob("*.py")) if home.is_dir() else [home]
    texts = {path.relative_to(home.parent).as_posix(): path.read_bytes() for path in files}
    return digest_of(texts)


def digest_of(texts: dict[str, bytes]) -> str:
    """The same, of files by their names, which begin with that of the package."""
    total = hashlib.sha256()
    for name in sorted(texts):
        code = texts[name].replace(b"\r\n", b"\n")
        total.update(f"{name} {len(code)}\n".encode() + code)
    return f"sha256:{total.hexdigest()}"


def read(path: Path) -> Certificate | None:
    """The certificate in a file; ``None`` if it is not one, or of a later format."""
    try:
        fields = json.loads(path.read_text("utf-8"))
        found = Certificate(**fields)
        return found if found.format == FORMAT and found.number else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def standing(modules: Iterable[str]) -> Standing:
    """How a distribution stands whose entry points name some modules: as the worst of these.

    Args:
        modules: Names of modules or packages; these are read, and not imported.
    """
    return worst(_standing_of(module.partition(".")[0]) for module in modules)


def worst(standings: Iterable[str]) -> Standing:
    """The worst of several."""
    found = {*standings}
    return next((each for each in _WORST_FIRST if each in found), "no certificate")


_WORST_FIRST: tuple[Standing, ...] = (
    "unreadable",
    "no certificate",
    "code changed",
    "other versions",
    "certified",
)


@cache
def _standing_of(package: str) -> Standing:
    home = home_of(package)
    if home is None or not place(home).is_file():
        return "no certificate"
    found = read(place(home))
    return "unreadable" if found is None else found.standing(digest(home))


@cache
def version_of_torch() -> str:
    """The version of torch that is installed, without an import."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _minor(text: str) -> str:
    """``"2.13"`` of ``"2.13.1+cpu"``: what is compared of versions."""
    match = re.match(r"\d+\.\d+", text)
    return match[0] if match else text
