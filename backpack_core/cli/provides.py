"""Finds what plugins provide, for the files beside their code, and checks such files.

``backpack certify`` writes the file of a package. To write those of all distributions that the core
knows, which must be installed::

    python -m backpack_core.cli.provides
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from backpack_core import discovery
from backpack_core.cli.certificate import json_of
from backpack_core.discovery import Plugin, beside
from backpack_core.plugins import ensure_loaded, known_plugins
from backpack_core.plugins.registry import registry
from backpack_core.preferences import Claim, qualified_name


def provided_by(plugins: Iterable[Plugin]) -> dict[str, dict[str, str]]:
    """What loaded plugins provide, by package, in the form of the file."""
    by_package: dict[str, dict[str, str]] = {}
    tables: list[tuple[Any, list[Claim[Any]]]]
    tables = [*registry.rules.items(), *registry.extensions.items()]
    for plugin in plugins:
        for key, claims in tables:
            for claim in claims:
                if claim.provenance == plugin.provenance:
                    names = by_package.setdefault(plugin.package, {})
                    names[qualified_name(key)] = _class_named(claim.value)
    return by_package


def _class_named(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def untrue(plugin: Plugin) -> Iterator[str]:
    """Sentences about what a loaded plugin's file declares, but the plugin does not provide."""
    provided = provided_by([plugin]).get(plugin.package, {})
    for name, value in discovery.declared_by(plugin.package).items():
        if value == plugin.value and qualified_name(name) not in provided:
            yield f"{discovery.PROVIDES} says that it provides {name}, but it does not"


def files(distributions: Iterable[str]) -> dict[Path, str]:
    """The texts of the files of some distributions, and of the core's file, by path."""
    ensure_loaded()
    texts, table = {}, {}
    for name in distributions:
        by_package = provided_by(p for p in known_plugins() if p.distribution == name)
        for package, provided in by_package.items():
            home = discovery.home_of(package)
            assert home is not None
            texts[beside(home, discovery.PROVIDES)] = json_of(provided)
        table[name] = sorted(name for provided in by_package.values() for name in provided)
    return {**texts, discovery.OUR_PLUGINS: json_of(table)}


def main() -> None:
    """Write the files."""
    for path, text in files(discovery.our_plugins()).items():
        path.write_text(text, "utf-8")
        print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
