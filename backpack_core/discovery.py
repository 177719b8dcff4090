"""Finds the installed plugins and what they provide, and decides which may load.

A distribution declares plugins as entry points of the group ``backpack``. Finding them reads the
``entry_points.txt`` of each distribution, and the metadata of those that declare plugins.

This module imports neither plugins nor torch, so that the command line starts fast.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from backpack_core.errors import PluginConflictError, PluginError, nearest
from backpack_core.preferences import Claim, Provenance, canonical, choose, names_in

GROUP = "backpack"

State = Literal["not loaded", "loaded", "blocked", "failed", "conflict"]


@dataclass(eq=False)
class Plugin:
    """One entry point of the group ``backpack``.

    Attributes:
        name: Name of the entry point.
        value: The object that it names, as ``"package.module:Class"``.
        distribution: The installed distribution that declares it.
        version: Its version; empty if the distribution has no metadata.
        requires: The normalised names of the distributions that it requires, directly or by other
            distributions with plugins.
        state: Whether it is loaded, or why not.
        error: The exception that it failed with.
    """

    name: str
    value: str
    distribution: str
    version: str
    requires: frozenset[str] = frozenset()
    state: State = "not loaded"
    error: BaseException | None = None

    @property
    def provenance(self) -> Provenance:
        """The provenance of this plugin's contributions."""
        return Provenance(self.name, self.distribution, self.version)

    @property
    def package(self) -> str:
        """The top-level package or module of the entry point."""
        return re.split(r"[.:\s\[]", self.value.strip())[0]

    @property
    def attribute(self) -> str:
        """The class that the entry point names; empty if it names a module."""
        return self.value.partition(":")[2].partition("[")[0].strip()  # extras follow in brackets

    def find(self) -> Any:
        """Import the object that the entry point names.

        Raises:
            PluginError: The module has no such attribute.
        """
        name = re.split(r"[:\[]", self.value)[0].strip()
        module = import_module(name)
        try:
            return attrgetter(self.attribute)(module) if self.attribute else module
        except AttributeError as error:
            raise PluginError(
                f"The entry point names {self.value!r}, but the module {name} has no "
                f"{self.attribute!r}{nearest(self.attribute, vars(module)) or '.'}"
            ) from error


def discover() -> list[Plugin]:
    """List installed plugins, sorted by distribution and name."""
    plugins = sorted(_declared(), key=lambda plugin: (plugin.distribution, plugin.name))
    requires = {canonical(plugin.distribution): plugin.requires for plugin in plugins}
    for plugin in plugins:
        plugin.requires = _closure(plugin.requires, requires)
    settle(plugins)
    return plugins


def _closure(names: frozenset[str], requires: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Some distributions, and all that these require."""
    more = names.union(*(requires.get(name, ()) for name in names))
    return names if more == names else _closure(more, requires)


def settle(plugins: list[Plugin]) -> None:
    """Decide which plugins may load, from the environment's lists and conflicts of names.

    Args:
        plugins: All installed plugins. Their ``state`` and ``error`` are set anew, unless they were
            loaded, or tried, and still may be.
    """
    allowed = _allowed(plugins)
    for plugin in plugins:
        rivals = [Claim(p, p.provenance) for p in allowed if p.name == plugin.name]
        try:
            may_load = plugin in allowed and choose(rivals, plugin.name, "name").value is plugin
        except PluginConflictError as error:
            plugin.state, plugin.error = "conflict", error
            continue
        if not may_load:
            plugin.state, plugin.error = "blocked", None
        elif plugin.state not in ("loaded", "failed"):
            plugin.state, plugin.error = "not loaded", None


def _allowed(plugins: list[Plugin]) -> list[Plugin]:
    """The plugins that the environment lets load.

    The allow-list and the block-list name plugins (entry points) or distributions. If a plugin is
    allowed, so are the libraries that it requires. ``BACKPACK_REQUIRE_CERTIFIED=1`` allows only
    plugins with a certificate that is valid for the installed code and versions. *Gates* decide
    this, entry points of ``backpack.gates``: the core does not know their criteria.
    """
    listed = os.environ.get("BACKPACK_LOAD_PLUGINS")
    if listed is not None:
        named = names_in(listed)
        chosen = [plugin for plugin in plugins if plugin.provenance.names & named]
        required = named.union(*(plugin.requires for plugin in chosen))
        plugins = [p for p in plugins if p in chosen or canonical(p.distribution) in required]
    blocked = names_in(os.environ.get("BACKPACK_BLOCK_PLUGINS", ""))
    plugins = [p for p in plugins if not p.provenance.names & blocked]
    if os.environ.get("BACKPACK_REQUIRE_CERTIFIED", "0") not in ("", "0"):
        from importlib_metadata import entry_points

        gates = [point.load() for point in entry_points(group=f"{GROUP}.gates", name="certified")]
        # Nothing may load if no gate is installed.
        plugins = [p for p in plugins if gates and all(gate(p) for gate in gates)]
    return plugins


def _declared() -> Iterator[Plugin]:
    """The plugins that distributions declare, with what these require directly.

    Only the metadata of those that declare plugins is parsed. Parsing that of all distributions
    takes several times as long.
    """
    from email.parser import HeaderParser

    from importlib_metadata import distributions

    visible: dict[str, Any] = {}
    for dist in distributions():
        # Python imports the first distribution of a name on the path. A folder without metadata was
        # left by an interrupted removal.
        first = visible.setdefault(name_of(dist), dist)
        if first is not dist and not first.read_text("METADATA"):
            visible[name_of(dist)] = dist
    for name, dist in visible.items():
        if f"[{GROUP}]" not in (dist.read_text("entry_points.txt") or ""):
            continue
        try:
            entry_points = [*dist.entry_points.select(group=GROUP)]
        except TypeError:  # a line is not an entry point
            continue
        # Not ``dist.metadata``: importing its parser takes longer than everything else here.
        headers = HeaderParser().parsestr(
            dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
        )
        needed = [r for r in headers.get_all("Requires-Dist", ()) if "extra ==" not in r]
        requires = frozenset(canonical(re.split(r"[^\w.-]", r, maxsplit=1)[0]) for r in needed)
        distribution, version = headers.get("Name") or canonical(name), headers.get("Version") or ""
        for point in entry_points:
            yield Plugin(point.name, point.value, distribution, version, requires)


def name_of(dist: Any) -> str:
    """The normalised name of a distribution, from the name of its metadata folder if possible."""
    return str(getattr(dist, "_normalized_name", None) or dist)


# What our own distributions provide, so that messages can name those that are not installed.
OUR_PLUGINS = Path(__file__).with_name("known-plugins.json")


def our_plugins() -> dict[str, list[str]]:
    """What distributions that the core knows provide, installed or not, by distribution."""
    return dict(json.loads(OUR_PLUGINS.read_text("utf-8")))
