"""Finds what plugins provide, for the files beside their code, and checks such files.

``backpack certify`` writes the file of a package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from backpack_checks.providers import declared_by
from backpack_core.cli.certificate import PROVIDES
from backpack_core.discovery import Plugin
from backpack_core.plugins.registry import registry
from backpack_core.preferences import qualified_name

KINDS = ("layer rule", "extension", "propagator", "pair override")  # of the registry's tables


def contributions(plugin: Plugin) -> Iterator[tuple[str, Any, Any]]:
    """What the registry has from a loaded plugin: kind, key and value."""
    for kind, table in zip(KINDS, registry.tables, strict=True):
        for key, claims in table.items():
            own = (claim.value for claim in claims if claim.provenance == plugin.provenance)
            yield from ((kind, key, value) for value in own)


def provided_by(plugins: Iterable[Plugin]) -> dict[str, dict[str, str]]:
    """What loaded plugins provide, by package, in the form of the file."""
    by_package: dict[str, dict[str, str]] = {}
    for plugin in plugins:
        for kind, key, value in contributions(plugin):
            if kind in ("layer rule", "extension"):
                names = by_package.setdefault(plugin.package, {})
                names[qualified_name(key)] = class_named(value)
    return by_package


def class_named(value: Any) -> str:
    """A class, or that of an instance, as entry points name it."""
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def untrue(plugin: Plugin) -> Iterator[str]:
    """Sentences about what a loaded plugin's file declares, but the plugin does not provide."""
    provided = provided_by([plugin]).get(plugin.package, {})
    for name, value in declared_by(plugin.package).items():
        if value == plugin.value and qualified_name(name) not in provided:
            yield f"{PROVIDES} says that it provides {name}, but it does not"
