"""Loads plugins when they are first needed, and isolates those that fail.

Plugins are loaded at the first ``extend()`` or ``backpack()``, or when an extension is asked for by
name. A plugin that fails is recorded, with one warning for its distribution. Whatever needs it
raises an error, chained to the plugin's traceback. Everything else works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, TypeAlias

from torch.nn import Module

from backpack_core import errors
from backpack_core.discovery import Plugin, discover, our_plugins, settle
from backpack_core.plugins.registration import enter, lock, withdraw
from backpack_core.plugins.registry import registry
from backpack_core.preferences import preferred, qualified_name

_plugins: list[Plugin] | None = None
_loading = False
_loaded = False


def known_plugins() -> list[Plugin]:
    """All installed plugins, with their state. The first call reads metadata and imports none."""
    global _plugins
    with lock:
        if _plugins is None:
            _plugins = discover()
        return _plugins


def ensure_loaded() -> None:
    """Load every allowed plugin, once per process.

    Raises:
        PluginLoadError: A plugin failed, and ``BACKPACK_STRICT_PLUGINS=1``.
    """
    if _loaded:
        return
    with lock:
        if not (_loading or _loaded):  # a plugin may ask for an extension while it is imported
            load_all(_raise_if_strict)
            for _, broken in groupby(failures(), key=attrgetter("distribution")):
                errors.warn(
                    f"{load_error(*broken)}\nEverything that does not need it works. `backpack "
                    "doctor` shows more.",
                    errors.BrokenPluginWarning,
                )


def load_all(after: Callable[[Plugin], None]) -> None:
    """Load every allowed plugin.

    Args:
        after: Called after each plugin. If it raises, loading ends, and may be tried again.
    """
    global _loading, _loaded
    with lock:
        _loading = True
        try:
            for plugin in known_plugins():
                load(plugin)
                after(plugin)
            _loaded = True
        finally:
            _loading = False


def _raise_if_strict(plugin: Plugin) -> None:
    if plugin.error is not None and os.environ.get("BACKPACK_STRICT_PLUGINS") == "1":
        raise load_error(plugin) from plugin.error


def load(plugin: Plugin) -> None:
    """Import and register a plugin, unless that was tried before or the plugin may not load.

    A failure raises no error here; it is recorded in ``plugin.error``.
    """
    if plugin.state != "not loaded":
        return
    # Set first: the import may ask for extensions, and so load plugins.
    plugin.state = "loaded"
    try:
        enter(plugin.find(), plugin.provenance)
    except KeyboardInterrupt:
        plugin.state = "not loaded"
        raise
    except BaseException as error:  # also SystemExit, and pytest's exceptions
        plugin.state, plugin.error = "failed", error


def failures() -> list[Plugin]:
    """Installed plugins that could not be loaded."""
    return [p for p in known_plugins() if p.error is not None]


def load_error(plugin: Plugin, *others: Plugin) -> errors.PluginLoadError:
    """The error that says why a plugin could not be loaded, and others of its distribution."""
    names = ", ".join(repr(each.name) for each in (plugin, *others))
    return errors.PluginLoadError(
        f"{names} of {plugin.provenance} could not be loaded: {type(plugin.error).__name__}: "
        f"{plugin.error}"
    )


def missing(
    message: str, wanted: str | type[Module], otherwise: str = ""
) -> errors.MissingPluginError:
    """The error for something that no plugin provides, chained to a failed plugin that might.

    Args:
        message: What was asked for.
        wanted: The name of the extension, or of a library's entry point, that was asked for; or
            the module class without a rule.
        otherwise: What to do if no plugin is known to provide it.
    """
    text, broken = ADVISERS[-1](wanted, otherwise)
    error = errors.MissingPluginError(message + text)
    error.__cause__ = None if broken is None else broken.error
    return error


SWITCHES = (
    "BACKPACK_LOAD_PLUGINS, BACKPACK_BLOCK_PLUGINS, BACKPACK_PREFER and BACKPACK_REQUIRE_CERTIFIED"
)


def advise(wanted: str | type[Module], otherwise: str) -> tuple[str, Plugin | None]:
    """The end of a message about something missing, and a broken plugin that might provide it."""
    plugins, broken = known_plugins(), next(iter(failures()), None)
    names = {str(wanted), *map(qualified_name, getattr(wanted, "__mro__", ()))}
    homes = [h for h, own in our_plugins().items() if not names.isdisjoint(own)]
    absent = [h for h in homes if h not in {plugin.distribution for plugin in plugins}]
    if absent:
        return "".join(f" {home} has it: pip install {home}." for home in absent), None
    blocked = [p for p in plugins if p.state == "blocked"]
    who = sorted({str(p.provenance) for p in blocked if not homes or p.distribution in homes})
    who[3:] = [f"{len(who) - 3} more"] * (len(who) > 3)
    text = otherwise
    if who:
        text += f" Installed, but blocked: {', '.join(who)}; check {SWITCHES}."
    if broken is not None:
        text += f" A plugin that may provide it is broken: {load_error(broken)}"
    return text, broken


# The last one is asked. A library appends one that knows more than our own distributions.
Adviser: TypeAlias = Callable[[str | type[Module], str], tuple[str, Plugin | None]]
ADVISERS: Final[list[Adviser]] = [advise]


def prefer(distribution: str, *keys: Any) -> None:
    """Choose between plugins that claim the same key.

    The environment variable ``BACKPACK_PREFER="key=distribution,..."`` does the same.

    Args:
        distribution: The distribution whose plugin is to be used, or the name under which a plugin
            was registered by hand.
        keys: What it is preferred for: a module class or its qualified name, the name of an
            extension, or the name of an entry point. Default: everything.

    Raises:
        UsageError: A name is not a string, or a key is neither a name nor a class.
    """
    if not isinstance(distribution, str) or not all(isinstance(k, (str, type)) for k in keys):
        raise errors.UsageError(
            "prefer(...) takes the name of a distribution, and classes or names that it is "
            f"preferred for. Got {(distribution, *keys)!r:.80}."
        )
    with lock:
        preferred.update((qualified_name(key), distribution) for key in keys or ("*",))
        registry.forget()
        plugins = _plugins or []
        before = [p for p in plugins if p.state == "loaded"]
        settle(plugins)
        for plugin in before:
            if plugin.state != "loaded":
                withdraw(plugin.provenance)
        for plugin in plugins if _loaded else ():
            load(plugin)
