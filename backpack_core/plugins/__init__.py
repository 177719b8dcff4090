"""Plugins: what they may do, how they are found, loaded and isolated, and who speaks for what."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backpack_core.plugins.discovery import Plugin as Plugin
    from backpack_core.plugins.loading import ensure_loaded as ensure_loaded
    from backpack_core.plugins.loading import failures as failures
    from backpack_core.plugins.loading import known_plugins as known_plugins
    from backpack_core.plugins.loading import load as load
    from backpack_core.plugins.loading import load_all as load_all
    from backpack_core.plugins.loading import prefer as prefer
    from backpack_core.plugins.loading import reset as reset
    from backpack_core.plugins.registration import API_VERSION as API_VERSION
    from backpack_core.plugins.registration import declared_api as declared_api
    from backpack_core.plugins.registration import hook_names as hook_names
    from backpack_core.plugins.registration import register as register
    from backpack_core.plugins.registration import temporary_plugin as temporary_plugin
    from backpack_core.plugins.registration import unregister as unregister

_HOMES = {
    "discovery": "Plugin",
    "loading": "ensure_loaded failures known_plugins load load_all prefer reset",
    "registration": ("API_VERSION declared_api hook_names register temporary_plugin unregister"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    # Listing plugins reads metadata only (``discovery``): torch is not to be imported for it.
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
