"""Says which plugins declare to provide what is missing, and why they do not.

What plugins declare is read from files, so that plugins that do not load are named, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch.nn import Module

from backpack_core.cli.certificate import PROVIDES, beside, home_of
from backpack_core.discovery import Plugin, our_plugins
from backpack_core.plugins import loading
from backpack_core.plugins.loading import SWITCHES, known_plugins, load_error
from backpack_core.plugins.registry import registry
from backpack_core.preferences import canonical, qualified_name


class Provider(NamedTuple):
    """A plugin that declares to provide something.

    Attributes:
        distribution: Its distribution.
        name: What it provides, as in the file, or the name of its entry point.
        plugin: The entry point; ``None`` if the distribution is not installed.
    """

    distribution: str
    name: str
    plugin: Plugin | None = None


def advise(wanted: str | type[Module], otherwise: str) -> tuple[str, Plugin | None]:
    """The end of a message, and a broken plugin that provides what is wanted; core's `Adviser`."""
    found = [*providers_of(wanted)]
    broken = [each.plugin for each in found if each.plugin and each.plugin.error is not None]
    if broken:
        return f" {load_error(broken[0])}", broken[0]
    texts = filter(None, dict.fromkeys(map(_why_not, found)))
    text = "".join(f" {text}" for text in texts)
    return (text, None) if text else loading.advise(wanted, otherwise)


def providers_of(wanted: str | type[Module]) -> Iterator[Provider]:
    """The providers of a name; of a class, or of its nearest parent that has providers."""
    kinds = wanted.__mro__ if isinstance(wanted, type) else ()
    for names in [{qualified_name(kind)} for kind in kinds] or [{str(wanted)}]:
        found = [*_providers(names, known_plugins())]
        if found:
            yield from found
            return


def _why_not(provider: Provider) -> str:
    """Why a provider is not used; empty if it was asked for by the name of an entry point."""
    package, _, name = provider.name.rpartition(".")
    plugin = provider.plugin
    what = f"a layer rule for {name}" if package else f"the extension {name}"
    what = "it" if plugin is not None and name == plugin.name else what
    if plugin is None:
        return f"{provider.distribution} has {what}: pip install {provider.distribution}."
    if plugin.state == "loaded" and not package:
        return ""
    registered = map(qualified_name, registry.rules)
    if plugin.state == "loaded" and qualified_name(provider.name) not in registered:
        return f"{plugin.provenance} declares {what}, but has none: `backpack doctor` says more."
    if plugin.state == "loaded":
        return (
            f"{plugin.provenance} has {what}, but it is not used for a class or an object that "
            f"computes something other than {name}, by its own forward or weight."
        )
    if plugin.error is not None:
        return str(load_error(plugin))
    return f"{plugin.provenance} has {what}, but is blocked: check {SWITCHES}."


def _providers(names: Collection[str], plugins: Iterable[Plugin]) -> Iterator[Provider]:
    """The plugins that declare to provide something.

    Args:
        names: Its possible names: qualified names of module types, or that of an extension or an
            entry point.
        plugins: The installed plugins.

    Yields:
        Installed providers, then others.
    """
    plugins = [*plugins]
    by_package: dict[str, dict[str, Plugin]] = {}
    for plugin in plugins:
        by_package.setdefault(plugin.package, {})[plugin.value] = plugin
    for package, by_value in by_package.items():
        declared = {name: p.value for p in by_value.values() for name in (p.name, p.attribute)}
        declared |= declared_by(package)
        first = next(iter(by_value.values()))
        for name in _among(declared, names):
            plugin = by_value.get(declared[name], first)
            yield Provider(plugin.distribution, name, plugin)
    installed = {canonical(plugin.distribution) for plugin in plugins}
    for distribution, provided in our_plugins().items():
        if distribution not in installed:
            yield from (Provider(distribution, name) for name in _among(provided, names))


def declared_by(package: str) -> dict[str, str]:
    """What the file of a package declares; empty if there is no valid file."""
    home = home_of(package)
    try:
        declared = json.loads(beside(home, PROVIDES).read_text("utf-8")) if home else None
    except (OSError, ValueError):
        return {}
    pairs = declared.items() if isinstance(declared, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _among(declared: Iterable[str], names: Collection[str]) -> list[str]:
    """The declared names that are wanted; a module type may be declared by an alias."""
    return [name for name in declared if name and qualified_name(name) in names]
