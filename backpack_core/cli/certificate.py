"""Reads certificates of the conformance kit, and tells whether they are valid.

A certificate is a JSON file in a package, so that every build backend can ship it, and anybody can
read it without an import. It contains a digest of the checked code, which is compared with the
installed code.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from importlib_metadata import PackageNotFoundError, version

if TYPE_CHECKING:
    from backpack_core.discovery import Plugin

NAME = "backpack-certificate.json"
PROVIDES = "backpack-provides.json"
FORMAT = 1

# From best to worst.
Standing = Literal["certified", "other versions", "code changed", "no certificate", "unreadable"]


def json_of(value: Any) -> str:
    """JSON that is sorted and indented, so that changes are readable."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Certificate:
    """What was checked, and with which versions.

    Attributes:
        distribution: Name of the distribution.
        code: Digest of the package's code; see :func:`digest`.
        kit: Version of backpack-core, which contains the kit.
        torch: Version of torch.
        checks: For each case the checks that ran, with ``"passed"`` or ``"expected failure"``.
        worst: The comparison in double precision that came closest to its tolerance: its name,
            relative error, and tolerance.
        unchecked: Entry points whose classes are in no case.
        format: Version of this file format.
    """

    distribution: str
    code: str
    kit: str
    torch: str
    checks: dict[str, dict[str, str]]
    worst: dict[str, Any]
    unchecked: list[str] = field(default_factory=list)
    format: int = FORMAT


def home_of(package: str) -> Path | None:
    """The folder of a package, or the file of a module, without importing it; else ``None``."""
    try:
        spec = find_spec(package.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return file.parent if spec.submodule_search_locations else file


def beside(home: Path, name: str) -> Path:
    """The path of a file about a package, or about a single module."""
    return home / name if home.is_dir() else home.with_suffix(f".{name}")


def file_of(home: Path) -> Path:
    """The path of the certificate of a package, or of a single module."""
    return beside(home, NAME)


def digest(home: Path) -> str:
    """A hash of all code of a package, equal on all systems.

    Args:
        home: The folder of the package, or the file of a module.
    """
    files = sorted(home.rglob("*.py")) if home.is_dir() else [home]
    texts = {path.relative_to(home.parent).as_posix(): path.read_bytes() for path in files}
    return digest_of(texts)


def digest_of(texts: dict[str, bytes]) -> str:
    """The hash of files, given by their paths, which begin with the name of the package."""
    total = hashlib.sha256()
    for name in sorted(texts):
        code = texts[name].replace(b"\r\n", b"\n")
        total.update(f"{name} {len(code)}\n".encode() + code)
    return f"sha256:{total.hexdigest()}"


def read(path: Path) -> Certificate | None:
    """The certificate in a file; ``None`` if it is invalid or of a later format."""
    try:
        fields = json.loads(path.read_text("utf-8"))
        certificate = Certificate(**fields)
        texts = (certificate.code, certificate.kit, certificate.torch)
        is_valid = certificate.format == FORMAT and all(isinstance(text, str) for text in texts)
        return certificate if is_valid and any(certificate.checks.values()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


@cache
def standing(package: str) -> Standing:
    """The state of the certificate of a package or single module; the package is not imported."""
    home = home_of(package)
    if home is None or not file_of(home).is_file():
        return "no certificate"
    certificate = read(file_of(home))
    if certificate is None:
        return "unreadable"
    if certificate.code != digest(home):
        return "code changed"
    is_same = _minor(certificate.kit) == _minor(version_of("backpack-core"))
    is_same = is_same and _minor(certificate.torch) == _minor(version_of("torch"))
    return "certified" if is_same else "other versions"


def is_certified(plugin: Plugin) -> bool:
    """The gate for ``BACKPACK_REQUIRE_CERTIFIED``: whether the plugin's certificate is valid."""
    return standing(plugin.package) == "certified"


@cache
def version_of(distribution: str) -> str:
    """The version of an installed distribution, without importing it; else an empty string."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _minor(text: str) -> str:
    """The part of a version that is compared: ``"2.13"`` of ``"2.13.1+cpu"``."""
    return "".join(re.findall(r"^\d+\.\d+", text)) or text
