"""Distributions that look installed, to test plugins without building or installing anything.

In a ``conftest.py``::

    from tests.distributions import fake_distribution as fake_distribution

and in a test::

    def test_scale(fake_distribution):
        fake_distribution(
            "backpack-plugin-scale",
            entry_points={"scale": "backpack_plugin_scale:ScaleRule"},
            modules={"backpack_plugin_scale": SOURCE},
        )
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from backpack_core.discovery import GROUP
from backpack_core.testing.isolation import reset

FakeDistribution: TypeAlias = Callable[..., Path]


def write_distribution(
    folder: Path,
    name: str,
    *,
    version: str = "0.1",
    entry_points: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
    metadata: bool = True,
    requires: Sequence[str] = (),
    group: str = GROUP,
) -> Path:
    """Write the files of an installed distribution.

    Args:
        folder: Where to write; put it on ``sys.path``.
        name: Name of the distribution.
        version: Its version.
        entry_points: Names and values in the group.
        modules: Sources by qualified module name.
        metadata: Whether there is a ``METADATA`` file, which real installers always write.
        requires: What the distribution requires.
        group: The group of the entry points.

    Returns:
        The ``*.dist-info`` folder.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    if metadata:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        text += "".join(f"Requires-Dist: {each}\n" for each in requires)
        (info / "METADATA").write_text(text, encoding="utf-8")
    if entry_points:
        lines = [f"[{group}]", *(f"{key} = {value}" for key, value in entry_points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, source in (modules or {}).items():
        _write_module(folder, module, source)
    return info


def _write_module(folder: Path, module: str, source: str) -> None:
    *parents, last = module.split(".")
    for parent in parents:
        folder = folder / parent
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    package = folder / last / "__init__.py"
    (package if package.exists() else folder / f"{last}.py").write_text(source, encoding="utf-8")


@pytest.fixture
def fake_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDistribution]:
    """A factory with the arguments of :func:`write_distribution`, except for the folder.

    Until the test ends, its distributions are found in addition to those that are really installed.
    """
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    modules_before = set(sys.modules)

    def make(name: str, **contents: object) -> Path:
        info = write_distribution(folder, name, **contents)  # type: ignore[arg-type]
        importlib.invalidate_caches()
        reset()
        return info

    yield make
    for name in set(sys.modules) - modules_before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    monkeypatch.undo()
    importlib.invalidate_caches()
    reset()
