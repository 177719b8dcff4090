"""Every installed extension by class name: ``from backpack_core.extensions import BatchGrad``."""

from __future__ import annotations

from typing import Any

from backpack_core.discovery import our_plugins
from backpack_core.errors import nearest
from backpack_core.plugins.loading import ensure_loaded, known_plugins, load, missing
from backpack_core.plugins.registry import registry
from backpack_core.preferences import choose


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or not (name[:1].isupper() or _near(name)):
        # Tools that only ask whether a name exists expect this error.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ensure_loaded()
    if name not in registry.extensions:
        # While a plugin is loaded, it may ask for the class of a later one.
        for plugin in known_plugins():
            if plugin.attribute == name:
                load(plugin)
    if claims := registry.extensions.get(name):
        return choose(claims, name, "extension").value
    raise missing(
        f"No loaded plugin provides an extension named {name!r}{_near(name) or '.'} Loaded: "
        f"{', '.join(__dir__()) or 'none'}.",
        name,
        " Install the plugin that has it; `backpack plugins` lists what is there.",
    )


def _near(name: str) -> str:
    ensure_loaded()
    known = (registry.extensions, *our_plugins().values())
    return nearest(name, (each for names in known for each in names))


def __dir__() -> list[str]:
    ensure_loaded()
    return sorted(registry.extensions)
