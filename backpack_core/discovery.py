"""Finds the installed plugins and what they provide, and decides which may load.

A distribution declares plugins as entry points of the group ``backpack``. Finding them reads the
``entry_points.txt`` of each distribution, and the metadata of those that declare plugins. A file
beside a plugin's code says what it provides, so that a message can name a plugin that is not
loaded. The file is a JSON object. Its keys are names of extensions (``"KFAC"``) and of module types
with a rule (``"torch.nn.modules.linear.Linear"``); its values are the classes behind them
(``"package.module:Class"``). ``backpack certify`` writes it.

This module imports neither plugins nor torch, so that the command line starts fast.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from backpack_core.errors import PluginError, nearest
from backpack_core.preferences import Provenance, canonical, conflict, preferred_of

GROUP = "backpack"

State = Literal["not loaded", "loaded", "blocked", "failed", "conflict"]

_VALUE = re.compile(r"(?P<module>[\w.]+)\s*(?::\s*(?P<attribute>[\w.]+))?\s*(\[.*\])?$")


@dataclass
class Plugin:
    """One entry point of the group ``backpack``.

    Attributes:
        name: Name of the entry point.
        value: The object that it names, as ``"package.module:Class"``.
        distribution: The installed distribution that declares it.
        version: Its version; empty if the distribution has no metadata.
        state: Whether it is loaded, or why not.
        error: The exception that it failed with.
        users: Distributions that require this one, directly or not, and the names of their
            plugins.
    """

    name: str
    value: str
    distribution: str
    version: str
    state: State = "not loaded"
    error: BaseException | None = None
    users: frozenset[str] = frozenset()

    @property
    def provenance(self) -> Provenance:
        """The provenance of this plugin's contributions."""
        return Provenance(self.name, self.distribution, self.version)

    @property
    def attribute(self) -> str:
        """The class that the entry point names; empty if it names a module."""
        return self.value.partition(":")[2].strip()

    @property
    def package(self) -> str:
        """The top-level package or module of the entry point."""
        return self.value.partition(":")[0].partition(".")[0].strip()

    def find(self) -> Any:
        """Import the object that the entry point names.

        Raises:
            PluginError: The value is not ``"package.module:attribute"``, or the module has no such
                attribute.
        """
        match = _VALUE.match(self.value)
        if match is None:
            raise PluginError(
                f"The entry point is {self.value!r}: write it as 'package.module:Class'."
            )
        module = import_module(match["module"])
        try:
            return attrgetter(match["attribute"])(module) if match["attribute"] else module
        except AttributeError as error:
            raise PluginError(
                f"The entry point names {self.value!r}, but the module {match['module']} has no "
                f"{match['attribute']!r}{nearest(match['attribute'], vars(module)) or '.'}"
            ) from error


def discover() -> list[Plugin]:
    """List installed plugins, sorted by distribution and name."""
    declared = [*declarations()]
    users = _users(declared)
    plugins = [
        Plugin(point.name, point.value, each.name, each.version, users=users[canonical(each.name)])
        for each in declared
        for point in each.entry_points
    ]
    plugins.sort(key=lambda plugin: (plugin.distribution, plugin.name))
    settle(plugins)
    return plugins


def settle(plugins: list[Plugin]) -> None:
    """Decide which plugins may load, from the environment's lists and conflicts of names.

    Args:
        plugins: All installed plugins. Their ``state`` and ``error`` are set anew, unless they were
            loaded already.
    """
    by_name: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        if plugin.state != "failed":
            allowed = is_allowed(plugin)
            if not allowed or plugin.state != "loaded":
                plugin.state, plugin.error = ("not loaded" if allowed else "blocked"), None
        if plugin.state != "blocked":
            by_name.setdefault(plugin.name, []).append(plugin)
    for name, rivals in by_name.items():
        if len(rivals) > 1:
            chosen = preferred_of(name, rivals)
            error = conflict("have the name", name, (p.provenance for p in rivals))
            for plugin in rivals:
                if chosen is None:
                    plugin.state, plugin.error = "conflict", error
                elif plugin is not chosen:
                    plugin.state, plugin.error = "blocked", None


def is_allowed(plugin: Plugin) -> bool:
    """Whether the environment's allow-list and block-list let a plugin load.

    Both lists name plugins (entry points) or distributions. If a plugin is allowed, so are the
    libraries that it requires. ``BACKPACK_REQUIRE_CERTIFIED=1`` allows only plugins with a
    certificate that is valid for the installed code and versions.
    """
    names = {canonical(plugin.name), canonical(plugin.distribution)}
    allowed = os.environ.get("BACKPACK_LOAD_PLUGINS")
    if allowed is not None and not (names | plugin.users) & _names(allowed):
        return False
    is_strict = os.environ.get("BACKPACK_REQUIRE_CERTIFIED", "0") not in ("", "0")
    if is_strict and {gate(plugin) for gate in _gates("certified")} != {True}:
        return False  # nothing may load if no gate is installed
    return not names & _names(os.environ.get("BACKPACK_BLOCK_PLUGINS", ""))


@cache
def _gates(name: str) -> list[Callable[[Plugin], bool]]:
    """The functions that say whether a plugin may load: entry points of ``backpack.gates``.

    The core does not know their criteria. They are imported only if they are needed.
    """
    from importlib_metadata import entry_points

    return [point.load() for point in entry_points(group=f"{GROUP}.gates", name=name)]


def _names(text: str) -> set[str]:
    return {canonical(name) for name in text.split(",") if name.strip()}


class Declaration(NamedTuple):
    """The metadata of a distribution that declares plugins."""

    name: str
    version: str
    entry_points: list[Any]
    requires: frozenset[str] = frozenset()


def _users(declared: Iterable[Declaration]) -> dict[str, frozenset[str]]:
    """By distribution: those that require it, directly or not, and the names of their plugins."""
    requires = {canonical(each.name): each.requires for each in declared}
    names = {canonical(d.name): {canonical(p.name) for p in d.entry_points} for d in declared}

    def all_required(user: str, seen: set[str]) -> set[str]:
        for other in requires.get(user, frozenset()) - seen:
            seen |= {other, *all_required(other, seen | {other})}
        return seen

    closure = {user: all_required(user, set()) for user in requires}
    return {
        name: frozenset().union(*({u, *names[u]} for u, needs in closure.items() if name in needs))
        for name in requires
    }


def declarations() -> Iterator[Declaration]:
    """The metadata of each distribution that declares plugins.

    Only their metadata is parsed. Parsing that of all distributions takes several times as long.
    """
    from email.parser import HeaderParser

    from importlib_metadata import distributions

    visible: dict[str, Any] = {}
    for dist in distributions():
        # Python imports the first distribution of a name on the path. A folder without metadata was
        # left by an interrupted removal.
        name = name_of(dist)
        first = visible.setdefault(name, dist)
        if first is not dist and first.read_text("METADATA"):
            continue
        visible[name] = dist
        if f"[{GROUP}]" not in (dist.read_text("entry_points.txt") or ""):
            continue
        try:
            entry_points = [*dist.entry_points.select(group=GROUP)]
        except TypeError:  # a line is not an entry point
            continue
        if entry_points:
            # Not ``dist.metadata``: importing its parser takes longer than everything else here.
            text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
            headers = HeaderParser().parsestr(text)
            needed = [r for r in headers.get_all("Requires-Dist", ()) if "extra ==" not in r]
            matches = [re.match(r"[\w.-]+", requirement) for requirement in needed]
            requires = frozenset(canonical(match[0]) for match in matches if match)
            distribution = headers.get("Name") or canonical(name)
            yield Declaration(distribution, headers.get("Version") or "", entry_points, requires)


def name_of(dist: Any) -> str:
    """The normalised name of a distribution, from the name of its metadata folder if possible."""
    return str(getattr(dist, "_normalized_name", None) or dist)


PROVIDES = "backpack-provides.json"
# What our own distributions provide, so that messages can name those that are not installed.
OUR_PLUGINS = Path(__file__).with_name("known-plugins.json")


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
    declared = _read(beside(home, PROVIDES)) if home else {}
    return {str(key): value for key, value in declared.items() if isinstance(value, str)}


def our_plugins() -> dict[str, list[str]]:
    """What distributions that the core knows provide, installed or not, by distribution."""
    return _read(OUR_PLUGINS)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
