"""Whether a package has a certificate of the conformance kit that holds. Imports nothing heavy.

A certificate is a JSON file in the package, so that every build backend can ship it and everybody
can read it without an import. It says which code was checked, by its digest: whoever reads it sees
whether that is the code that is installed.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from importlib_metadata import PackageNotFoundError, version

from backpack_core.provided import beside, home_of

if TYPE_CHECKING:
    from backpack_core.discovery import Plugin

NAME = "backpack-certificate.json"
FORMAT = 1

# The best first.
Standing = Literal["certified", "other versions", "code changed", "no certificate", "unreadable"]


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


def file_of(home: Path) -> Path:
    """Where the certificate of a package, or of a single module, is."""
    return beside(home, NAME)


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
        certificate = Certificate(**fields)
        told = (certificate.code, certificate.kit, certificate.torch)
        is_good = certificate.format == FORMAT and all(isinstance(text, str) for text in told)
        return certificate if is_good and any(certificate.checks.values()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


@cache
def standing(package: str) -> Standing:
    """How a package stands, or a single module, which is read and not imported."""
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
    """The gate that stands where ``BACKPACK_REQUIRE_CERTIFIED`` is set."""
    return standing(plugin.package) == "certified"


@cache
def version_of(distribution: str) -> str:
    """The version of a distribution that is installed, without an import."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _minor(text: str) -> str:
    """``"2.13"`` of ``"2.13.1+cpu"``: what is compared of versions."""
    match = re.match(r"\d+\.\d+", text)
    return match[0] if match else text
