"""Reads what plugins declare to provide, from a file beside their code.

So a message can name a plugin that is not loaded. The file is a JSON object. Its keys are names of
extensions (``"KFAC"``) and of module types with a rule (``"torch.nn.modules.linear.Linear"``); its
values are the classes behind them (``"package.module:Class"``). ``backpack certify`` writes it.
This module imports neither plugins nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from backpack_core.discovery import Plugin, canonical, qualified_name

NAME = "backpack-provides.json"
# What our own distributions provide, so that messages can name those that are not installed.
KNOWN = Path(__file__).with_name("known-plugins.json")


class Provider(NamedTuple):
    """A plugin that declares to provide something.

    Attributes:
        distribution: Its distribution.
        name: What it provides, as in the file, or the name of its entry point.
        plugin: The entry point; ``None`` if the distribution is not installed.
    """

    distribution: str
    name: str
    plugin: Plugin | None = None


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


def declared_by(package: str) -> dict[str, str]:
    """What the file of a package declares; empty if there is no valid file."""
    home = home_of(package)
    declared = _read(beside(home, NAME)) if home else {}
    return {str(key): value for key, value in declared.items() if isinstance(value, str)}


def known() -> dict[str, list[str]]:
    """What distributions that the core knows provide, installed or not, by distribution."""
    return _read(KNOWN)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def providers(names: Collection[str], plugins: Iterable[Plugin]) -> Iterator[Provider]:
    """The plugins that declare to provide something.

    Args:
        names: Its possible names: qualified names of module types, or that of an extension or an
            entry point.
        plugins: The installed plugins.

    Yields:
        Installed providers, then others.
    """
    plugins = [*plugins]
    for package in dict.fromkeys(plugin.package for plugin in plugins):
        by_value = {plugin.value: plugin for plugin in plugins if plugin.package == package}
        declared = {name: p.value for p in by_value.values() for name in (p.name, p.attribute)}
        declared |= declared_by(package)
        first = next(iter(by_value.values()))
        for name in _among(declared, names):
            plugin = by_value.get(declared[name], first)
            yield Provider(plugin.distribution, name, plugin)
    installed = {canonical(plugin.distribution) for plugin in plugins}
    for distribution, provided in known().items():
        if distribution not in installed:
            yield from (Provider(distribution, name) for name in _among(provided, names))


def _among(declared: Iterable[str], names: Collection[str]) -> list[str]:
    """The declared names that are wanted; a module type may be declared by an alias."""
    return [name for name in declared if name and qualified_name(name) in names]
