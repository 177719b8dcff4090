"""Runs the conformance kit on a package, and writes its certificate. Imports no plugin."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from backpack_core.cli.certificate import (
    NAME,
    PROVIDES,
    Certificate,
    beside,
    digest,
    digest_of,
    file_of,
    json_of,
    version_of,
)
from backpack_core.discovery import GROUP
from backpack_core.errors import BackpackError, UsageError


class Project(NamedTuple):
    """A package in development.

    Attributes:
        name: Name of the distribution.
        entry_points: Its entry points in the group ``backpack``.
        homes: Folders of its packages, or files of its modules.
    """

    name: str
    entry_points: dict[str, str]
    homes: list[Path]


def project(folder: Path) -> Project:
    """The project that a ``pyproject.toml`` describes.

    Raises:
        UsageError: There is no such file, it declares no plugin, or its code is not found.
    """
    try:
        text = (folder / "pyproject.toml").read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"There is no pyproject.toml in {str(folder)!r}. Name the folder of a plugin's package."
        ) from error
    table = _toml(text).get("project", {})
    groups = table.get("entry-points", {})
    if not groups.get(GROUP):
        other = f" There is [project.entry-points.{next(iter(groups))}]." if groups else ""
        raise UsageError(
            f"{table.get('name', folder.name)} declares no plugin: its pyproject.toml has no "
            f"entry point in [project.entry-points.{GROUP}].{other}"
        )
    points = {str(name): str(value) for name, value in groups[GROUP].items()}
    tops = sorted({value.partition(":")[0].partition(".")[0].strip() for value in points.values()})
    return Project(str(table["name"]), points, [_home(folder, top) for top in tops])


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pytest depends on it
        import tomli as tomllib
    return tomllib.loads(text)


def _home(folder: Path, top: str) -> Path:
    for parent in (folder, folder / "src"):
        for home in (parent / top, parent / f"{top}.py"):
            if home.exists():
                return home
    raise UsageError(
        f"An entry point names {top!r}, and {str(folder)!r} has neither {top} nor src/{top}."
    )


def certify(*folders: Path, tests: Iterable[Path] = ()) -> dict[Path, Certificate]:
    """Run the tests of packages, and write a certificate beside the code of each.

    Args:
        folders: The folders of their ``pyproject.toml``. The tests run once, for all of them.
        tests: What pytest runs; default: what the first package configures.

    Returns:
        The certificates, one for each package of a distribution, by path.

    Raises:
        UsageError: There is nothing to check.
        BackpackError: A test fails.
    """
    projects = [project(folder) for folder in folders]
    recorded = _run(folders[0].resolve(), projects, [str(path.resolve()) for path in tests])
    return {path: made for one in projects for path, made in _certified(one, *recorded)}


def _certified(
    package: Project, entries: list[Any], provides: dict[str, Any]
) -> Iterator[tuple[Path, Certificate]]:
    """Write the certificates of one distribution, and the files of what it provides."""
    checks: dict[str, dict[str, str]] = {}
    for _, case, check, status, _ in entries:
        checks.setdefault(case, {})[check] = status
    checked = {kind for kinds, *_ in entries for kind in kinds}
    # Entry points of modules with hooks are not counted: they take part in all checks.
    unchecked = [n for n, v in package.entry_points.items() if ":" in v and v not in checked]
    if not checks or len(unchecked) == len(package.entry_points):
        raise UsageError(
            f"No check of the kit ran for a class of {package.name}, so there is nothing to "
            "certify. Write a test with parametrize_checks: see `backpack new layer NAME`."
        )
    compared: list[dict[str, Any]] = [worst for *_, worst in entries if worst]
    closest = max(compared, key=lambda w: float(w["error"] / w["allowed"]), default={})
    versions = version_of("backpack-core"), version_of("torch")
    for home in package.homes:
        certificate = Certificate(package.name, digest(home), *versions, checks, closest, unchecked)
        file_of(home).write_text(json_of(asdict(certificate)), "utf-8")
        if home.stem in provides:  # it is installed
            text = json_of(provides[home.stem])
            beside(home, PROVIDES).write_text(text, "utf-8")
        yield file_of(home), certificate


def _run(folder: Path, projects: list[Project], tests: list[str]) -> list[Any]:
    """What the kit's checks reported, in a subprocess that imports the packages' code."""
    parents = [str(home.resolve().parent) for each in projects for home in each.homes]
    names = " and ".join(each.name for each in projects)
    path = os.pathsep.join(filter(None, [*parents, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as temporary:
        ledger = Path(temporary) / "ledger.json"
        result = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "backpack_core.cli.ledger"),
                *("--backpack-ledger", str(ledger), *tests),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            absent = "".join(
                f" {each.name} is not installed: try `pip install -e '.[test]'` in its folder."
                for each in projects
                if not version_of(each.name)
            )
            raise BackpackError(
                f"No certificate was written for {names}, because tests fail.{absent}\n"
                + (result.stdout + result.stderr).strip()[-3000:]
            )
        return list(json.loads(ledger.read_text("utf-8")))


def into_wheels(place: Path, certificates: Mapping[Path, Certificate]) -> list[Path]:
    """Write certificates into finished wheels, whatever built them.

    Args:
        place: A wheel for all of them, or a folder with a wheel of each distribution.
        certificates: As :func:`certify` returned them.

    Returns:
        The wheels.

    Raises:
        UsageError: A wheel is missing, or there are several, or one contains other code.
    """
    by_wheel: dict[Path, dict[Path, Certificate]] = {}
    for path, certificate in certificates.items():
        wheel = _wheel_of(certificate.distribution, place) if place.is_dir() else place
        by_wheel.setdefault(wheel, {})[path] = certificate
    for wheel, own in by_wheel.items():
        _into_wheel(wheel, own)
    return [*by_wheel]


def _wheel_of(distribution: str, folder: Path) -> Path:
    name = re.sub(r"[-_.]+", "_", distribution)
    wheels = sorted(folder.glob(f"{name}-*.whl"))
    if len(wheels) != 1:
        raise UsageError(
            f"{str(folder)!r} has {len(wheels)} wheels of {distribution}, not one. Build it with "
            "`python -m build`, into a folder without earlier wheels."
        )
    return wheels[0]


def _into_wheel(wheel: Path, certificates: Mapping[Path, Certificate]) -> None:
    with zipfile.ZipFile(wheel) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    for path, certificate in certificates.items():
        is_package = path.name == NAME
        inside = f"{path.parent.name}/" if is_package else path.name.replace(f".{NAME}", ".py")
        code = {n: t for n, t in entries.items() if n.startswith(inside) and n.endswith(".py")}
        if digest_of(code) != certificate.code:
            raise UsageError(
                f"{wheel.name} contains code other than that certified. Build it again, then: "
                "backpack certify FOLDER --wheel dist/NAME.whl."
            )
        for name in (NAME, PROVIDES):
            source = path.with_name(path.name.replace(NAME, name))
            if source.exists():
                entries[inside + name if is_package else source.name] = source.read_bytes()
    (record,) = (name for name in entries if name.endswith(".dist-info/RECORD"))
    entries[record] = _record(entries, record).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)


def _record(entries: dict[str, bytes], record: str) -> str:
    lines = []
    for name, content in entries.items():
        if name != record:
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines.append(f"{name},sha256={hashed.decode()},{len(content)}")
    return "\n".join([*lines, f"{record},,"]) + "\n"
