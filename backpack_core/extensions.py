"""Every installed extension by class name: ``from backpack_core.extensions import BatchGrad``."""

from __future__ import annotations

from typing import Any

from backpack_core.discovery import choose
from backpack_core.errors import nearest
from backpack_core.plugins.loading import ensure_loaded, load_provider, missing
from backpack_core.plugins.registry import registry
from backpack_core.provided import known


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ensure_loaded()
    if name not in registry.extensions:
        load_provider(name)  # a plugin may ask, while it is loaded, for the class of a later one
    claims = registry.extensions.get(name)
    if claims:
        return choose(claims, name, "extension").value
    raise missing(_why_missing(name), name)


def _why_missing(name: str) -> str:
    installed = registry.extensions
    elsewhere = (each for names in known().values() for each in names if "." not in each)
    near = nearest(name, installed) or nearest(name, elsewhere) or "."
    return (
        f"No loaded plugin provides an extension named {name!r}{near} Installed: "
        f"{', '.join(sorted(installed)) or 'none'}. Install the plugin that has it; "
        "`backpack plugins` lists what is there."
    )


def __dir__() -> list[str]:
    ensure_loaded()
    return sorted(registry.extensions)
