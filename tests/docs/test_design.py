"""The design pages speak of what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
HOMES = ("backpack_core", "plugins", "benchmarks")
FILES = {
    path.relative_to(ROOT).as_posix() for home in HOMES for path in (ROOT / home).rglob("*.py")
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text("utf-8")):
        assert any(f"/{file}".endswith(f"/{name}") for file in FILES), name


def test_the_glossary_is_short() -> None:
    text = (ROOT / "docs" / "design" / "glossary.md").read_text("utf-8")
    words = re.findall(r"^\| ([a-z]+) \|", text, re.M)[1:]
    assert 10 < len(words) == len(set(words)) <= 20
