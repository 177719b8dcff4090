"""Writes what the distributions of this repository provide, which must be installed.

Run ``python plugins/make_provides.py`` after a change to an entry point, or to what a plugin
provides: the file of each package, from which messages name a plugin that is not loaded, and core's
own file, from which they name one that is not installed. A test compares the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from backpack_core import discovery
from backpack_core.cli.certificate import PROVIDES, beside, home_of, json_of
from backpack_core.cli.provides import provided_by
from backpack_core.plugins import ensure_loaded, known_plugins


def files(distributions: Iterable[str]) -> dict[Path, str]:
    """The texts of the files of some distributions, and of the core's file, by path."""
    ensure_loaded()
    texts, table = {}, {}
    for name in distributions:
        by_package = provided_by(p for p in known_plugins() if p.distribution == name)
        for package, provided in by_package.items():
            home = home_of(package)
            assert home is not None
            texts[beside(home, PROVIDES)] = json_of(provided)
        table[name] = sorted(name for provided in by_package.values() for name in provided)
    return {**texts, discovery.OUR_PLUGINS: json_of(table)}


def main() -> None:
    """Write the files."""
    for path, text in files(discovery.our_plugins()).items():
        path.write_text(text, "utf-8")
        print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
