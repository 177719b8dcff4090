"""Loads and isolates plugins. Imports pluggy and core, and plugins when they are first needed.

Loading is lazy: it happens at the first ``extend()`` or ``backpack()``, or when a name is asked
for. A plugin that fails is recorded and warned about once; what needs it raises with its own
traceback chained, and everything else works.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pluggy
from torch.nn import Module

from backpack_core.contract.extension import look_up_rules
from backpack_core.contract.hook import PROJECT
from backpack_core.errors import (
    BrokenPluginWarning,
    MissingPluginError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginVersionError,
    add_library_folder,
)
from backpack_core.plugins import hookspecs
from backpack_core.plugins.discovery import Plugin as Plugin
from backpack_core.plugins.discovery import Provenance, discover, settle
from backpack_core.plugins.registry import check_contributions, registry

API_VERSION = 2
# Of plugins that do not say: nothing older was published.
FIRST_API = 2
SUPPORTED_API = frozenset({2})

_manager = pluggy.PluginManager(PROJECT)
_manager.add_hookspecs(hookspecs)
_lock = threading.RLock()
_plugins: list[Plugin] | None = None
_loading = False
_loaded = False


def known_plugins() -> list[Plugin]:
    """All plugins as far as they are known; reads metadata the first time, and imports none."""
    global _plugins
    with _lock:
        if _plugins is None:
            _plugins = discover(registry.preference)
        return _plugins


def ensure_loaded() -> None:
    """Load every allowed plugin, once per process.

    Raises:
        PluginLoadError: A plugin failed, and ``BACKPACK_STRICT_PLUGINS=1``.
    """
    if _loaded:
        return
    with _lock:
        if _loading or _loaded:  # a plugin that is being imported asks for an extension, say
            return
        load_all(_raise_if_strict)
        _warn(failures())


def load_all(
    after: Callable[[Plugin], None], before: Callable[[Plugin], None] | None = None
) -> None:
    """Load every allowed plugin.

    Args:
        after: Called after each plugin. What it raises ends the loading, which may be tried again.
        before: Called before each plugin.
    """
    global _loading, _loaded
    with _lock:
        _loading = True
        try:
            for plugin in known_plugins():
                if before is not None:
                    before(plugin)
                load(plugin)
                after(plugin)
            _loaded = True
        finally:
            _loading = False


def _raise_if_strict(plugin: Plugin) -> None:
    if plugin.error is not None and os.environ.get("BACKPACK_STRICT_PLUGINS") == "1":
        raise load_error(plugin) from plugin.error


def load(plugin: Plugin) -> None:
    """Import and register a plugin, unless that was tried already, or it may not load.

    Never raises for the plugin's sake: a failure is recorded in ``plugin.error``.
    """
    if plugin.state != "not loaded":
        return
    plugin.state = (
        "loaded"  # also while it is being imported: it may import the rest of its package
    )
    try:
        _register(plugin.find(), _key(plugin.provenance), plugin.provenance)
    except KeyboardInterrupt:
        plugin.state = "not loaded"
        raise
    except BaseException as error:  # SystemExit, and what tools of the plugin raise to stop a run
        plugin.state, plugin.error = "failed", error


def load_provider(name: str) -> None:
    """Load the plugin whose entry point names a class of this name, ahead of the others."""
    with _lock:
        for plugin in known_plugins():
            if plugin.attribute == name:
                load(plugin)


def _warn(broken: list[Plugin]) -> None:
    """One warning for each distribution, however many plugins it declares."""
    by_distribution: dict[str, list[Plugin]] = {}
    for plugin in broken:
        by_distribution.setdefault(str(plugin.provenance), []).append(plugin)
    for who, mine in by_distribution.items():
        names = ", ".join(repr(p.name) for p in mine)
        warnings.warn(
            f"Out of use: {names} of {who}, because of {_reason(mine[0])}\nEverything that does "
            "not need it works. `backpack doctor` shows more.",
            BrokenPluginWarning,
            stacklevel=4,
        )


def _reason(plugin: Plugin) -> str:
    return f"{type(plugin.error).__name__}: {plugin.error}"


def load_error(plugin: Plugin) -> PluginLoadError:
    """The error that says why a plugin is out of use."""
    return PluginLoadError(
        f"The plugin {plugin.name!r} of {plugin.provenance} ({plugin.value}) could not be loaded: "
        f"{_reason(plugin)}"
    )


def _key(provenance: Provenance) -> str:
    """The name under which pluggy knows a plugin: two distributions may use one name."""
    return f"{provenance.distribution}:{provenance.plugin}"


def _register(obj: Any, key: str, provenance: Provenance) -> None:
    """Register a plugin object: all of it, or nothing."""
    _check_version(obj, provenance)
    other = _manager.get_name(obj)
    if other is not None:
        raise PluginConflictError(f"{obj!r} is registered already, as {other.strip(':')!r}.")
    source = getattr(sys.modules.get(str(getattr(obj, "__module__", ""))), "__file__", None)
    if source and provenance.distribution:
        add_library_folder(source)
    try:
        _manager.register(obj, key)
        contributions = check_contributions(_collect(obj))
    except BaseException:
        if _manager.has_plugin(key):
            _manager.unregister(name=key)
        raise
    registry.add(contributions, provenance)


def _collect(obj: Any) -> dict[str, list[Any]]:
    """Call the hook implementations of one plugin only."""
    found: dict[str, list[Any]] = {}
    for caller in _manager.get_hookcallers(obj) or ():
        if not caller.has_spec():
            raise PluginError(f"{caller.name} is no hook. The hooks are {', '.join(hook_names())}.")
        for implementation in caller.get_hookimpls():
            if implementation.plugin is obj:
                found[caller.name] = _as_list(caller.name, implementation.function())
    if not found:
        raise PluginError(
            f"{obj!r} provides nothing: name a class derived from LayerRule, Extension or "
            "Propagator, or a module with functions marked by backpack_core.hookimpl."
        )
    return found


def _as_list(hook: str, returned: Any) -> list[Any]:
    try:
        iterator = iter(returned)
    except TypeError:
        raise PluginError(f"{hook} must return an iterable. Got {returned!r}.") from None
    return list(iterator)


def hook_names() -> list[str]:
    """Names of all hooks, sorted."""
    return sorted(
        name
        for name in vars(hookspecs)
        if _manager.parse_hookspec_opts(hookspecs, name) is not None
    )


def declared_api(obj: Any) -> set[int]:
    """Versions of the plugin interface that a plugin says it was written for.

    ``backpack_api``, an integer or several, on the object, on its module, or on its package.
    Without it, the first that was published.
    """
    module = str(getattr(obj, "__module__", None) or getattr(obj, "__name__", ""))
    places = (obj, sys.modules.get(module), sys.modules.get(module.partition(".")[0]))
    for place in places:
        declared = getattr(place, "backpack_api", None)
        if declared is not None:
            return {declared} if isinstance(declared, int) else set(declared)
    return {FIRST_API}


def _check_version(obj: Any, provenance: Provenance) -> None:
    declared = declared_api(obj)
    if declared & SUPPORTED_API:
        return
    ours = ", ".join(map(str, sorted(SUPPORTED_API)))
    raise PluginVersionError(
        f"It was written for version {', '.join(map(str, declared))} of the plugin interface; this "
        f"backpack-core speaks version {ours}. Install a release of "
        f"{provenance.distribution or provenance.plugin} made for it, or another backpack-core."
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
        PluginConflictError: It is registered already, or a plugin of that name is.
    """
    name = name or _name_of(obj)
    provenance = Provenance(name)
    with _lock:
        if _manager.has_plugin(_key(provenance)):
            raise PluginConflictError(
                f"A plugin named {name!r} is registered already: pass another name, or call "
                f"backpack_core.unregister({name!r}) first."
            )
        _register(obj, _key(provenance), provenance)
    return obj


def _name_of(obj: Any) -> str:
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", repr(obj)))


def unregister(name: str) -> None:
    """Take back what :func:`register` did.

    Args:
        name: The name it was registered under.

    Raises:
        PluginError: There is no such plugin.
    """
    with _lock:
        if not _manager.has_plugin(_key(Provenance(name))):
            raise PluginError(f"No plugin named {name!r} was registered in this process.")
        _unregister(Provenance(name))


def _unregister(provenance: Provenance) -> None:
    _manager.unregister(name=_key(provenance))
    registry.remove(provenance)


@contextmanager
def temporary_plugin(*objects: Any) -> Iterator[None]:
    """Register plugins for the length of a ``with`` block, for tests.

    Args:
        objects: What :func:`register` takes.
    """
    names = [f"{_name_of(obj)} (temporary {id(obj)})" for obj in objects]
    done: list[str] = []
    try:
        for obj, name in zip(objects, names, strict=True):
            register(obj, name)
            done.append(name)
        yield
    finally:
        for name in done:
            unregister(name)


def prefer(distribution: str, *keys: Any) -> None:
    """Choose between plugins that claim the same key.

    The environment variable ``BACKPACK_PREFER="key=distribution,..."`` does the same from outside.

    Args:
        distribution: The distribution whose plugin is to be used, or the name under which a plugin
            was registered by hand.
        keys: What it is preferred for: a module class or its qualified name, the name of an
            extension, or the name of an entry point. Default: everything.
    """
    with _lock:
        registry.prefer(distribution, *keys)
        if _plugins is None:
            return
        before = [p for p in _plugins if p.state == "loaded"]
        settle(_plugins, registry.preference)
        for plugin in before:
            if plugin.state != "loaded":
                _unregister(plugin.provenance)
        if _loaded:
            for plugin in _plugins:
                load(plugin)


def failures() -> list[Plugin]:
    """Plugins that are installed but out of use because of an error."""
    return [p for p in known_plugins() if p.error is not None]


def missing(message: str, hint: str) -> MissingPluginError:
    """The error for a capability nobody provides, chained to the failed plugin that might have.

    Args:
        message: What was asked for.
        hint: The class that was asked for, or the module class that has no rule.
    """
    broken = failures()
    suspects = [p for p in broken if _may_provide(p, hint)] or broken
    if not suspects:
        return MissingPluginError(message)
    error = MissingPluginError(
        f"{message} A plugin that may provide it is broken. {load_error(suspects[0])}"
    )
    error.__cause__ = suspects[0].error
    return error


def _may_provide(plugin: Plugin, hint: str) -> bool:
    """Whether a plugin's name or class resembles the class that was asked for."""
    wanted = hint.lower()
    names = (plugin.name.replace("_", ""), plugin.attribute.removesuffix("Rule"))
    return any(name and (name.lower() in wanted or wanted in name.lower()) for name in names)


def reset() -> None:
    """Forget everything that was discovered and loaded, as in a fresh process."""
    global _plugins, _loaded
    with _lock:
        for name, plugin in list(_manager.list_name_plugin()):
            if plugin is not None:
                _manager.unregister(name=name)
        registry.clear()
        _plugins, _loaded = None, False


def _has_rule(module_type: type[Module]) -> bool:
    """Whether an installed plugin has a layer rule for a type of module."""
    ensure_loaded()
    return not registry.resolve_type(module_type).is_fallback


look_up_rules(_has_rule)
