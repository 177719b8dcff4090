"""Discovers, loads and isolates plugins. Imports pluggy and core; importlib-metadata on first use.

Loading is lazy: it happens at the first ``extend()`` or ``backpack()``, or when a name is asked for.
A plugin that fails is recorded and warned about once; what needs it raises with its own traceback
chained, and everything else works.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pluggy

from backpack_core import hookspecs
from backpack_core.errors import (
    BrokenPluginWarning,
    MissingPluginError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginVersionError,
)
from backpack_core.registry import Provenance, check_contributions, registry

GROUP = "backpack"
API_VERSION = 1

State = Literal["not loaded", "loaded", "blocked", "failed", "conflict"]


@dataclass
class Plugin:
    """One entry point of the group ``backpack``.

    Attributes:
        name: Name of the entry point.
        value: What it names, as ``"package.module:Class"``.
        distribution: The installed distribution that declares it.
        version: Its version.
        state: How far it got.
        error: Why it failed.
    """

    name: str
    value: str
    distribution: str
    version: str
    state: State = "not loaded"
    error: BaseException | None = None
    entry_point: Any = None

    @property
    def provenance(self) -> Provenance:
        """Where contributions of this plugin come from."""
        return Provenance(self.name, self.distribution, self.version)


_manager = pluggy.PluginManager(hookspecs.PROJECT)
_manager.add_hookspecs(hookspecs)
_lock = threading.RLock()
_plugins: list[Plugin] | None = None
_loaded = False


def discover() -> list[Plugin]:
    """List installed plugins from metadata, without importing any of them."""
    import importlib_metadata

    points = importlib_metadata.entry_points(group=GROUP)
    found = [
        Plugin(
            name=point.name,
            value=point.value,
            distribution=point.dist.name if point.dist else "",
            version=point.dist.version if point.dist else "",
            entry_point=point,
        )
        for point in points
    ]
    found.sort(key=lambda p: (p.distribution, p.name))
    by_name: dict[str, list[Plugin]] = {}
    for plugin in found:
        by_name.setdefault(plugin.name, []).append(plugin)
        if not _is_allowed(plugin.name):
            plugin.state = "blocked"
    for same in by_name.values():
        _mark_conflict([p for p in same if p.state != "blocked"])
    return found


def _mark_conflict(same: list[Plugin]) -> None:
    if len({p.value for p in same}) < 2:
        return
    wanted = registry._preference(same[0].name)
    for plugin in same:
        if plugin.distribution != wanted:
            plugin.state = "blocked" if wanted else "conflict"
    if not wanted:
        who = " and ".join(str(p.provenance) for p in same)
        error = PluginConflictError(
            f"Two plugins have the name {same[0].name!r}: {who}. Uninstall one of them, or set "
            f"BACKPACK_PREFER={same[0].name}={same[0].distribution}."
        )
        for plugin in same:
            plugin.error = error


def _is_allowed(name: str) -> bool:
    """Whether the allow-list and the block-list of the environment let a plugin load."""
    allowed = os.environ.get("BACKPACK_LOAD_PLUGINS")
    blocked = os.environ.get("BACKPACK_BLOCK_PLUGINS", "")
    if allowed is not None and name not in [n.strip() for n in allowed.split(",")]:
        return False
    return name not in [n.strip() for n in blocked.split(",")]


def plugins() -> list[Plugin]:
    """All plugins as far as they are known; reads metadata the first time."""
    global _plugins
    with _lock:
        if _plugins is None:
            _plugins = discover()
        return _plugins


def ensure_loaded() -> None:
    """Load every allowed plugin, once per process."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        _loaded = True  # before loading: a plugin may itself ask for an extension by name
        for plugin in plugins():
            if plugin.state == "not loaded":
                _load(plugin)
            elif plugin.state == "conflict":
                _report(plugin)


def _load(plugin: Plugin) -> None:
    try:
        _register(plugin.entry_point.load(), plugin.name, plugin.provenance)
    except (Exception, SystemExit) as error:
        plugin.state, plugin.error = "failed", error
        _report(plugin)
    else:
        plugin.state = "loaded"


def _report(plugin: Plugin) -> None:
    if os.environ.get("BACKPACK_STRICT_PLUGINS") == "1":
        raise _load_error(plugin) from plugin.error
    warnings.warn(
        f"The plugin {plugin.name!r} of {plugin.provenance} is out of use: "
        f"{type(plugin.error).__name__}: {plugin.error}. Everything that does not need it works; "
        "`backpack doctor` shows more.",
        BrokenPluginWarning,
        stacklevel=3,
    )


def _load_error(plugin: Plugin) -> PluginLoadError:
    return PluginLoadError(
        f"The plugin {plugin.name!r} of {plugin.provenance} ({plugin.value}) could not be loaded: "
        f"{type(plugin.error).__name__}: {plugin.error}"
    )


def _register(obj: Any, name: str, provenance: Provenance) -> None:
    """Register a plugin object: all of it, or nothing."""
    _check_version(obj, name, provenance)
    _manager.register(obj, name)
    try:
        contributions = check_contributions(_collect(obj))
    except BaseException:
        _manager.unregister(name=name)
        raise
    registry.add(contributions, provenance)


def _collect(obj: Any) -> dict[str, list[Any]]:
    """Call the hook implementations of one plugin only."""
    found: dict[str, list[Any]] = {}
    for caller in _manager.get_hookcallers(obj) or ():
        for implementation in caller.get_hookimpls():
            if implementation.plugin is obj:
                found[caller.name] = list(implementation.function())
    if not found:
        raise PluginError(
            f"{obj!r} provides nothing: name a class derived from LayerRule, Extension or "
            "Propagator, or a module with functions marked by backpack_core.hookimpl."
        )
    return found


def _check_version(obj: Any, name: str, provenance: Provenance) -> None:
    declared = getattr(obj, "backpack_api", API_VERSION)
    if declared != API_VERSION:
        raise PluginVersionError(
            f"The plugin {name!r} of {provenance} was written for version {declared} of the plugin "
            f"interface; this backpack-core speaks version {API_VERSION}. Install a release of "
            f"{provenance.distribution or name} made for it, or another backpack-core."
        )


def register(obj: Any, name: str | None = None) -> Any:
    """Register a plugin of this process: a rule, extension or propagator class, or a module.

    What an installed package does with an entry point, a script or notebook does with this. May be
    used as a class decorator.

    Args:
        obj: A class derived from one of core's base classes, or an object with hook
            implementations.
        name: A name for :func:`unregister` and for messages; default: its qualified name.

    Returns:
        ``obj`` itself.

    Raises:
        PluginError: It provides nothing, or something other than its hooks promise.
        PluginConflictError: A plugin of that name is registered already.
    """
    name = name or getattr(obj, "__qualname__", None) or getattr(obj, "__name__", repr(obj))
    with _lock:
        if _manager.has_plugin(name):
            raise PluginConflictError(
                f"A plugin named {name!r} is registered already: pass another name, or call "
                f"backpack_core.unregister({name!r}) first."
            )
        _register(obj, name, Provenance(name))
    return obj


def unregister(name: str) -> None:
    """Take back what :func:`register` did.

    Args:
        name: The name it was registered under.

    Raises:
        PluginError: There is no such plugin.
    """
    with _lock:
        if not _manager.has_plugin(name):
            raise PluginError(f"No plugin named {name!r} is registered.")
        _manager.unregister(name=name)
        registry.remove(name)


@contextmanager
def temporary_plugin(*objects: Any) -> Iterator[None]:
    """Register plugins for the length of a ``with`` block, for tests.

    Args:
        objects: What :func:`register` takes.
    """
    names = [f"{getattr(obj, '__qualname__', repr(obj))} (temporary {id(obj)})" for obj in objects]
    done: list[str] = []
    try:
        for obj, name in zip(objects, names, strict=True):
            register(obj, name)
            done.append(name)
        yield
    finally:
        for name in done:
            unregister(name)


def failures() -> Iterable[Plugin]:
    """Plugins that are installed but out of use because of an error."""
    return [p for p in plugins() if p.state in ("failed", "conflict")]


def missing(message: str, hint: str) -> MissingPluginError:
    """The error for a capability nobody provides, chained to a failed plugin that might have.

    Args:
        message: What was asked for.
        hint: A word that the name or value of a failed plugin would contain.
    """
    for plugin in failures():
        if hint.lower() in f"{plugin.name} {plugin.value}".lower().replace("_", ""):
            error = MissingPluginError(f"{message} {_load_error(plugin)}")
            error.__cause__ = plugin.error
            return error
    return MissingPluginError(message)


def reset() -> None:
    """Forget everything that was discovered and loaded, as in a fresh process."""
    global _plugins, _loaded
    with _lock:
        for name, plugin in list(_manager.list_name_plugin()):
            if plugin is not None:
                _manager.unregister(name=name)
                registry.remove(name)
        _plugins, _loaded = None, False
