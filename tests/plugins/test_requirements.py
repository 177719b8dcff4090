"""What a distribution imports of ours, it requires, directly or by what it requires."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.plugins.test_rooms import PACKAGES, ROOT, imported

tomllib = pytest.importorskip("tomllib")  # Python 3.11

HOMES = {
    **PACKAGES,
    "backpack_data": ROOT / "data/backpack_data",
    "backpack_compat": ROOT / "compat/backpack_compat",
}


@cache
def declared() -> dict[str, tuple[str, set[str]]]:
    """By package: the name of its distribution, and those that it requires without an extra."""
    found = {}
    for package, home in HOMES.items():
        project = tomllib.loads((home.parent / "pyproject.toml").read_text())["project"]
        names = [re.match(r"[\w-]+", each) for each in project.get("dependencies", ())]
        found[package] = project["name"], {name[0] for name in names if name}
    return found


def required(package: str) -> set[str]:
    """The packages of ours that are installed with a package, itself among them."""
    names = {name: other for other, (name, _) in declared().items()}
    found, todo = set[str](), [package]
    while todo:
        own = todo.pop()
        if own not in found:
            found.add(own)
            todo += [names[name] for name in declared()[own][1] if name in names]
    return found


def entered(package: str) -> Iterator[str]:
    """The packages of ours that are imported when modules of a package are: not in functions."""
    for path in HOMES[package].rglob("*.py"):
        tops = {name.partition(".")[0] for name in imported(path, runs=True)}
        for top in tops & HOMES.keys():
            if re.search(rf"^(from|import) {top}\b", path.read_text(), re.MULTILINE):
                yield top


@pytest.mark.parametrize("package", [name for name in HOMES if name != "backpack_core"])
def test_what_is_imported_is_required(package: str) -> None:
    assert {*entered(package)} <= required(package)


def test_what_is_required_is_found() -> None:
    assert required("backpack_operations") == {
        "backpack_operations",
        "backpack_products",
        "backpack_core",
    }
