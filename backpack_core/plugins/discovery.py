"""Which plugins are installed, from metadata alone. Imports no plugin.

An installed distribution declares plugins as entry points of the group ``backpack``. Listing them
reads ``entry_points.txt`` of each distribution and the head of its ``METADATA``, and no module; not
even torch, so that it takes no time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from backpack_core.errors import PluginConflictError, PluginError

GROUP = "backpack"
PREFIX = "backpack-plugin-"

State = Literal["not loaded", "loaded", "blocked", "failed", "conflict"]

_VALUE = re.compile(r"(?P<module>[\w.]+)\s*(?::\s*(?P<attribute>[\w.]+))?\s*(\[.*\])?$")


class Provenance(NamedTuple):
    """Where a contribution came from.

    Attributes:
        plugin: Name of the entry point, or of the object that was registered by hand.
        distribution: Name of the installed distribution; empty for one registered by hand.
        version: Its version.
    """

    plugin: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        """As ``"backpack-plugin-scale 0.1"``."""
        if not self.distribution:
            return f"registered by hand as {self.plugin!r}"
        return f"{self.distribution} {self.version}".rstrip()


@dataclass
class Plugin:
    """One entry point of the group ``backpack``.

    Attributes:
        name: Name of the entry point.
        value: What it names, as ``"package.module:Class"``.
        distribution: The installed distribution that declares it.
        version: Its version; empty where the distribution has no metadata.
        state: How far it got.
        error: Why it failed.
    """

    name: str
    value: str
    distribution: str
    version: str
    state: State = "not loaded"
    error: BaseException | None = None

    @property
    def provenance(self) -> Provenance:
        """Where contributions of this plugin come from."""
        return Provenance(self.name, self.distribution, self.version)

    @property
    def attribute(self) -> str:
        """The class that the entry point names; empty where it names a module."""
        return self.value.partition(":")[2].strip()

    def find(self) -> Any:
        """Import what the entry point names.

        Raises:
            PluginError: The value is no ``"package.module:attribute"``, or the module has no such
                attribute.
        """
        match = _VALUE.match(self.value)
        if match is None:
            raise PluginError(
                f"The entry point is {self.value!r}: write it as 'package.module:Class'."
            )
        module = import_module(match["module"])
        if match["attribute"] is None:
            return module
        try:
            return attrgetter(match["attribute"])(module)
        except AttributeError as error:
            raise PluginError(
                f"The entry point names {self.value!r}, but the module {match['module']} has no "
                f"{match['attribute']!r}."
            ) from error


def discover(preference: Callable[[str], str]) -> list[Plugin]:
    """List installed plugins, sorted by distribution and name.

    Args:
        preference: The preferred distribution for a key, or an empty string.
    """
    found = [
        Plugin(name, value, distribution, version)
        for distribution, version, entry_points in _declarations()
        for name, value in entry_points.items()
    ]
    found.sort(key=lambda p: (p.distribution, p.name))
    settle(found, preference)
    return found


def settle(plugins: list[Plugin], preference: Callable[[str], str]) -> None:
    """Say which plugins may load: the environment's lists, and one plugin for each name.

    Args:
        plugins: All installed plugins; ``state`` and ``error`` of those that did not get as far as
            loading are rewritten.
        preference: The preferred distribution for a key, or an empty string.
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
            _settle_rivals(rivals, canonical(preference(name)))


def _settle_rivals(rivals: list[Plugin], wanted: str) -> None:
    chosen = [p for p in rivals if canonical(p.distribution) == wanted]
    if chosen:
        for plugin in rivals:
            if plugin is not chosen[0]:
                plugin.state, plugin.error = "blocked", None
        return
    name, first = rivals[0].name, rivals[0].distribution
    who = " and ".join(str(p.provenance) for p in rivals)
    error = PluginConflictError(
        f"Several plugins have the name {name!r}: {who}. Uninstall all but one, call "
        f"backpack_core.prefer({first!r}, {name!r}), or set BACKPACK_PREFER={name}={first}."
    )
    for plugin in rivals:
        plugin.state, plugin.error = "conflict", error


def is_allowed(plugin: Plugin) -> bool:
    """Whether the allow-list and the block-list of the environment let a plugin load.

    Both name plugins (entry points) or distributions.
    """
    own = {canonical(plugin.name), canonical(plugin.distribution)}
    allowed = os.environ.get("BACKPACK_LOAD_PLUGINS")
    if allowed is not None and not own & _names(allowed):
        return False
    return not own & _names(os.environ.get("BACKPACK_BLOCK_PLUGINS", ""))


def _names(text: str) -> set[str]:
    return {canonical(name) for name in text.split(",") if name.strip()}


def preferred_by_environment() -> dict[str, str]:
    """The pairs of ``BACKPACK_PREFER="key=distribution,..."``; ``*`` is a key, too."""
    pairs = os.environ.get("BACKPACK_PREFER", "").split(",")
    return dict(pair.strip().rsplit("=", 1) for pair in pairs if "=" in pair)


def canonical(name: str) -> str:
    """A name of a distribution or plugin, spelled as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def without_plugins() -> list[str]:
    """Installed distributions named ``backpack-plugin-*`` that declare no entry point."""
    from importlib_metadata import distributions

    declared = {canonical(distribution) for distribution, _, _ in _declarations()}
    names = {canonical(_headers(dist)[0]) for dist in distributions()}
    return sorted(name for name in names if name.startswith(PREFIX) and name not in declared)


def _declarations() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Distribution name, version and entry points, for each distribution that has some of ours.

    ``importlib_metadata.entry_points()`` would do, but parses every group of every distribution,
    and the whole of the metadata for each name: several times slower.
    """
    from importlib_metadata import distributions

    visible: dict[str, Any] = {}
    for dist in distributions():
        # What Python imports is the first of a name on the path. A folder without metadata is what
        # an interrupted removal leaves behind.
        first = visible.setdefault(_folder_name(dist), dist)
        if first is not dist and first.read_text("METADATA"):
            continue
        visible[_folder_name(dist)] = dist
        entry_points = _entry_points(dist.read_text("entry_points.txt") or "")
        if entry_points:
            yield *_headers(dist), entry_points


def _entry_points(text: str) -> dict[str, str]:
    """The lines ``name = value`` of our group."""
    found, group = {}, ""
    for line in map(str.strip, text.splitlines() if f"[{GROUP}]" in text else ()):
        if line.startswith("["):
            group = line.strip("[] ")
        elif group == GROUP and "=" in line and line[0] not in "#;":
            name, _, value = line.partition("=")
            found[name.strip()] = value.strip()
    return found


def _headers(dist: Any) -> tuple[str, str]:
    """Name and version, without parsing the rest of the metadata."""
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    fields = dict(
        line.split(": ", 1) for line in text.split("\n\n", 1)[0].splitlines() if ": " in line
    )
    name = fields.get("Name") or canonical(_folder_name(dist))
    return name.strip(), fields.get("Version", "").strip()


def _folder_name(dist: Any) -> str:
    """The normalised name, which importlib_metadata takes from the folder's name where it can."""
    return str(getattr(dist, "_normalized_name", None) or dist)
