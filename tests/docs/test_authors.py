"""The code on the pages for authors runs as it stands, each block by itself."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest
import torch

import backpack_core
from backpack_core import preferences
from backpack_core.cli import scaffold
from tests import forks
from tests.docs.registrations import forgotten

PAGES = Path(__file__).parents[2] / "docs" / "authors"


class Block(NamedTuple):
    """Code in Python, where it begins, and what stands before it on the page."""

    name: str
    code: str


def blocks() -> list[Block]:
    found = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(f"{page.name}:{line}", match.group(1)))
    return found


BLOCKS = blocks()


@pytest.fixture
def as_a_reader_runs_it() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    preferred = dict(preferences.preferred)
    with mock.patch.dict(os.environ), forgotten():
        yield
    torch.set_default_dtype(before)
    preferences.preferred.clear()
    preferences.preferred.update(preferred)


RUN_TESTS = """
import os
from pathlib import Path

import pytest

path = Path(os.environ["FILE"])
os.chdir(path.parent)
print("ended with", int(pytest.main(["-q", "-p", "no:cacheprovider", str(path)])))
"""


@pytest.mark.usefixtures("as_a_reader_runs_it")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script; a block with tests is run as a file of tests."""
    is_test = "def test_" in block.code
    path = tmp_path / ("test_page.py" if is_test else "page.py")
    path.write_text(block.code, encoding="utf-8")
    if not is_test:
        script = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", script)
        exec(compile(block.code, str(path), "exec"), vars(script))
        vars(script).clear()  # classes are remembered, and would keep all that their script had
        return
    said = forks.python(RUN_TESTS, FILE=str(path))
    assert said.endswith("ended with 0\n"), said
    assert " passed" in said


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block_checks_something(block: Block) -> None:
    assert "assert " in block.code or "@parametrize_checks" in block.code


def test_every_kind_of_thing_has_a_block() -> None:
    pages = {block.name.split(":")[0] for block in BLOCKS}
    assert {"layer.md", "extension.md", "propagator.md", "performance.md"} <= pages
    assert {"hooks.md", "testing.md", "lookup.md", "versioning.md"} <= pages


def bare(tree: ast.AST) -> str:
    """A class without docstrings and comments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and isinstance(body, list):
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                del body[0]
            if isinstance(node, ast.ClassDef):
                node.decorator_list = [
                    d for d in node.decorator_list if "register" not in ast.dump(d)
                ]
    return ast.dump(tree)


def classes(code: str) -> dict[str, str]:
    tree = ast.parse(code)
    return {node.name: bare(node) for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(
    ("page", "kind", "name"),
    [
        ("layer.md", "layer", "scale"),
        ("extension.md", "extension", "l1_norm"),
        ("propagator.md", "propagator", "fisher"),
    ],
)
def test_what_is_generated_is_what_the_page_shows(
    page: str, kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaffold, "REPOSITORY", str(tmp_path / "templates"))
    assert f"backpack new {kind} {name}\n" in (PAGES / page).read_text(encoding="utf-8")
    made = scaffold.create(kind, name, tmp_path)
    generated = classes((made / f"backpack_plugin_{name}" / "__init__.py").read_text("utf-8"))
    shown = classes(next(block.code for block in BLOCKS if block.name.startswith(page)))
    assert generated
    for title, code in generated.items():
        assert shown[title] == code


PUBLIC = [getattr(backpack_core, name) for name in dir(backpack_core)]


@pytest.mark.parametrize("base", [value for value in PUBLIC if inspect.isabstract(value)])
def test_help_shows_what_is_to_be_written(base: type) -> None:
    """pydoc leaves out methods that begin with an underscore."""
    text = pydoc.plain(pydoc.render_doc(base)).partition("Method resolution order")[0]
    for name in base.__abstractmethods__:  # type: ignore[attr-defined]
        assert f"{name}(" in text, name


CLASSES = [value for value in PUBLIC if inspect.isclass(value)]


@pytest.mark.parametrize("page", sorted(page.name for page in PAGES.glob("*.md")))
def test_methods_have_the_arguments_of_the_page(page: str) -> None:
    """The first ones at least, by their names, in some class of the interface."""
    text = (PAGES / page).read_text(encoding="utf-8")
    for name, shown in re.findall(r"`(?:\w+\.)?(\w+)\(([a-z_][a-z_, ]*)\)", text):
        given = shown.split(", ")
        methods = [method for kind in CLASSES if (method := getattr(kind, name, None))]
        found = [list(inspect.signature(m).parameters) for m in methods if inspect.isfunction(m)]
        assert not found or any(known[1 : 1 + len(given)] == given for known in found), name
