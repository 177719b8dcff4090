"""The design pages speak of what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
HOMES = ("backpack_core", "plugins", "benchmarks", "tests")
FILES = {
    path.relative_to(ROOT).as_posix() for home in HOMES for path in (ROOT / home).rglob("*.py")
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text("utf-8")):
        assert any(f"/{file}".endswith(f"/{name}") for file in FILES), name


def test_every_room_of_the_core_is_named() -> None:
    """What lies in the core's folder stands in the table of rooms, and nothing else does."""
    text = (ROOT / "docs" / "design" / "core.md").read_text("utf-8")
    table = text.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", table))
    folder = ROOT / "backpack_core"
    rooms = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert named == rooms | files


def test_the_glossary_is_short() -> None:
    text = (ROOT / "docs" / "design" / "glossary.md").read_text("utf-8")
    words = re.findall(r"^\| ([a-z]+) \|", text, re.M)[1:]
    assert 10 < len(words) == len(set(words)) <= 20
