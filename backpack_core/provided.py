"""What plugins say they provide, in a file beside their code. Imports no plugin, and not torch.

The file speaks for plugins that do not load. It is a JSON object. Its keys are the names of
extensions (``"KFAC"``) and of types of modules with a rule (``"torch.nn.modules.linear.Linear"``),
its values the classes behind them (``"package.module:Class"``). ``backpack certify`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from backpack_core.discovery import Plugin, canonical, qualified_name

NAME = "backpack-provides.json"
# The names by distribution, of those that are known whether they are installed or not.
KNOWN = Path(__file__).with_name("known-plugins.json")


class Provider(NamedTuple):
    """A plugin that says it provides something.

    Attributes:
        distribution: Its distribution.
        name: What it provides, as in the file, or the name of its entry point.
        plugin: The entry point; ``None`` if the distribution is not installed.
    """

    distribution: str
    name: str
    plugin: Plugin | None = None


def home_of(package: str) -> Path | None:
    """The folder of a package, or the file of a module; ``None`` if there is none. No import."""
    try:
        spec = find_spec(package.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return file.parent if spec.submodule_search_locations else file


def beside(home: Path, name: str) -> Path:
    """Where a file about a package, or about a single module, is."""
    return home / name if home.is_dir() else home.with_suffix(f".{name}")


def text_of(found: Any) -> str:
    """What is in a file, as JSON whose changes can be read."""
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def declared_by(package: str) -> dict[str, str]:
    """What the file of a package says; nothing if there is none, or if it is damaged."""
    home = home_of(package)
    found = _read(beside(home, NAME)) if home else {}
    return {str(key): value for key, value in found.items() if isinstance(value, str)}


def known() -> dict[str, list[str]]:
    """What distributions provide that core knows of, by distribution."""
    return _read(KNOWN)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def providers(names: Collection[str], plugins: Iterable[Plugin]) -> Iterator[Provider]:
    """The plugins that say they provide something.

    Args:
        names: What it may be called: qualified names of module types, or that of an extension or
            an entry point.
        plugins: Those that are installed.

    Yields:
        Installed ones, then others.
    """
    plugins = [*plugins]
    for package in dict.fromkeys(plugin.package for plugin in plugins):
        mine = {plugin.value: plugin for plugin in plugins if plugin.package == package}
        said = {name: p.value for p in mine.values() for name in (p.name, p.attribute)}
        said |= declared_by(package)
        first = next(iter(mine.values()))
        for name in _among(said, names):
            plugin = mine.get(said[name], first)
            yield Provider(plugin.distribution, name, plugin)
    installed = {canonical(plugin.distribution) for plugin in plugins}
    for distribution, provided in known().items():
        if distribution not in installed:
            yield from (Provider(distribution, name) for name in _among(provided, names))


def _among(said: Iterable[str], names: Collection[str]) -> list[str]:
    """Those that are said to be provided; a module type may be named by an alias."""
    return [name for name in said if name and qualified_name(name) in names]
