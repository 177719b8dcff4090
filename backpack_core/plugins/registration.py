"""Registers plugins with pluggy. Each is checked first, and registered completely or not at all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import pluggy
from pluggy import PluginValidationError

from backpack_core import errors
from backpack_core.plugins import hookspecs
from backpack_core.plugins.hookspecs import PROJECT
from backpack_core.plugins.registry import Contribution, contributions, hook_of, registry
from backpack_core.preferences import Provenance
from backpack_core.record import storage


class _Manager(pluggy.PluginManager):
    """Finds hooks of a class by their names: its other attributes are many, and slow to look at."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """The options of an implementation; ``None`` for other attributes."""
        is_other = isinstance(plugin, type) and not name.startswith(f"{PROJECT}_")
        return None if is_other else super().parse_hookimpl_opts(plugin, name)


manager: Final = _Manager(PROJECT)
manager.add_hookspecs(hookspecs)
hooks: Final = manager.hook


def answer(hook: str) -> Any:
    """What the library that answers a hook returns; it is asked again when plugins have changed."""
    return _answer(hook, registry.generation)


@lru_cache(maxsize=4)
def _answer(hook: str, generation: int) -> Any:
    return getattr(hooks, hook)()


API_VERSION = 2
# The version of plugins that declare none, which is the first that was published.
FIRST_API = 2
SUPPORTED_API = frozenset({2})

# Held while the registry is changed.
lock = threading.RLock()


def hook_names() -> list[str]:
    """Names of all hooks, sorted."""
    return sorted(name for name in vars(hookspecs) if name.startswith(f"{PROJECT}_"))


def _key(provenance: Provenance) -> str:
    """The name of a plugin in pluggy, unique even if two distributions use one name."""
    return f"{provenance.distribution}:{provenance.plugin}"


def enter(obj: Any, provenance: Provenance, is_new: bool = False) -> None:
    """Register everything that a plugin contributes, or nothing.

    Args:
        obj: The plugin.
        provenance: Its origin.
        is_new: Whether its author is at work; see :class:`Candidate`.
    """
    _check_version(obj, provenance)
    if (other := manager.get_name(obj)) is not None:
        raise errors.PluginConflictError(f"{obj!r} is registered already, as {other.strip(':')!r}.")
    source = getattr(sys.modules.get(str(getattr(obj, "__module__", ""))), "__file__", None)
    if source and provenance.distribution:
        errors.add_library_folder(source)
    try:
        manager.register(obj, _key(provenance))
        registry.add(_collect(obj, is_new), provenance)
        _settle(obj)
    except BaseException as error:
        withdraw(provenance)
        if isinstance(error, PluginValidationError):
            raise errors.PluginError(
                f"A hook of {provenance} does not match its specification: {error}. Write it as "
                "backpack_core.plugins.hookspecs has it."
            ) from error
        raise


def _settle(obj: Any) -> None:
    """Ask for the storage again after a plugin that may provide it has come or gone."""
    if hasattr(obj, "backpack_storage"):
        storage.use(hooks.backpack_storage())


def _collect(obj: Any, is_new: bool) -> list[Contribution]:
    """What a class is itself, and what the hooks of a plugin return, checked."""
    own_hook, callers = hook_of(obj), manager.get_hookcallers(obj) or ()
    if own_hook is None and not callers:
        raise errors.PluginError(
            f"{obj!r} provides nothing: name a class derived from LayerRule, Extension or "
            "Propagator, or a module with functions marked by backpack_core.hookimpl."
        )
    items = [] if own_hook is None else [(own_hook, obj)]
    for caller in callers:
        hook = caller.name
        if not caller.has_spec():
            raise errors.PluginError(
                f"{hook} is not a hook. The hooks are {', '.join(hook_names())}."
            )
        if hook not in hookspecs.OF_PASSES:
            (own,) = (each for each in caller.get_hookimpls() if each.plugin is obj)
            returned = own.function()
            if not isinstance(returned, Iterable):
                raise errors.PluginError(f"{hook} must return an iterable. Got {returned!r}.")
            items += [(hook, item) for item in returned]
    return [each for pair in items for each in contributions(*pair, is_new)]


def _check_version(obj: Any, provenance: Provenance) -> None:
    """Raise an error if a plugin was written for another version of the plugin interface.

    ``backpack_api`` of the object, its module, or its package is the version, or several. Default:
    the first published version.
    """
    module = str(getattr(obj, "__module__", None) or getattr(obj, "__name__", ""))
    levels = (obj, sys.modules.get(module), sys.modules.get(module.partition(".")[0]))
    found = (getattr(level, "backpack_api", None) for level in levels)
    declared = next((each for each in found if each is not None), FIRST_API)
    versions = declared if isinstance(declared, (tuple, list, set)) else (declared,)
    if not versions or not all(type(version) is int for version in versions):
        raise errors.PluginError(
            "backpack_api is the version of the plugin interface, an integer, or a tuple of "
            f"several. Got {declared!r}."
        )
    if SUPPORTED_API.isdisjoint(versions):
        theirs, ours = (", ".join(map(str, sorted(each))) for each in (versions, SUPPORTED_API))
        raise errors.PluginVersionError(
            f"It was written for version {theirs} of the plugin interface; this backpack-core "
            f"speaks version {ours}. Install a release of "
            f"{provenance.distribution or provenance.plugin} made for it, or another backpack-core."
        )


def register(obj: Any, name: str | None = None) -> Any:
    """Register a plugin in this process: a rule, extension or propagator class, or a module.

    Scripts and notebooks use this where an installed package has an entry point. It also works as a
    class decorator. A class that is defined in ``__main__`` replaces an earlier one of its name,
    unless it is refused, so that a notebook's cell can run again.

    Args:
        obj: A class derived from one of the core's base classes, or an object with hook
            implementations.
        name: A name for :func:`unregister` and for messages; default: its qualified name.

    Returns:
        ``obj`` itself.

    Raises:
        PluginError: It provides nothing, or something other than its hooks promise.
        PluginConflictError: It is registered already, or a plugin of that name is.
    """
    name = name or name_of(obj)
    provenance = Provenance(name)
    with lock:
        if (earlier := manager.get_plugin(_key(provenance))) is not None:
            if not _is_rerun(earlier, obj):
                raise errors.PluginConflictError(
                    f"A plugin named {name!r} is registered already: pass another name, or call "
                    f"backpack_core.unregister({name!r}) first."
                )
            withdraw(provenance)
        try:
            enter(obj, provenance, is_new=True)
        except BaseException:
            if earlier is not None:
                enter(earlier, provenance)
            raise
    return obj


def _is_rerun(earlier: Any, obj: Any) -> bool:
    """Whether a notebook's cell, or a line of a console, has defined a class again."""
    if not isinstance(earlier, type) or not isinstance(obj, type) or earlier is obj:
        return False
    return "__main__" == earlier.__module__ == obj.__module__ and (
        earlier.__qualname__ == obj.__qualname__
    )


def name_of(obj: Any) -> str:
    """The default name of an object that is registered by hand."""
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", repr(obj)))


def unregister(plugin: Any) -> None:
    """Undo :func:`register`.

    Args:
        plugin: What was registered, or the name it was registered under.

    Raises:
        PluginError: There is no such plugin.
    """
    name = plugin if isinstance(plugin, str) else name_of(plugin)
    with lock:
        if not manager.has_plugin(_key(Provenance(name))):
            names = [p.rpartition(":")[2] for p, _ in manager.list_name_plugin() if p[:1] == ":"]
            near = errors.nearest(name, names) or ". BACKPACK_BLOCK_PLUGINS blocks installed ones."
            raise errors.PluginError(
                f"No plugin named {name!r} was registered in this process{near}"
            )
        withdraw(Provenance(name))


def withdraw(provenance: Provenance) -> None:
    """Remove everything that a plugin contributed."""
    if manager.has_plugin(_key(provenance)):
        _settle(manager.unregister(name=_key(provenance)))
    registry.remove(provenance)
