"""The pages of the site: their code runs, and every error has an entry."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch

from backpack_core import errors
from backpack_core.cli.trouble import trouble
from tests.docs.registrations import forgotten

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TROUBLE = DOCS / "troubleshooting.md"
# Pages whose code has tests of its own.
ELSEWHERE = {TROUBLE, *(DOCS / "authors").glob("*.md")}
# Code, and what it prints if an indented block follows.
BLOCK = re.compile(r"^```python\n(.*?)^```$((?:\n\n?    [^\n]+)*)", re.DOTALL | re.MULTILINE)
# Not in the environment of the tests: make bench-env installs it.
PEER = re.compile(r"^from (laplace)\b", re.MULTILINE)
WIDTH = 98  # characters of code that fit beside the menu, in a window of 1,280 pixels


def written() -> list[Path]:
    """The pages that are written by hand."""
    made = {"_build", "api", "gallery"}
    return [
        page
        for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
        if not made & set(page.relative_to(ROOT).parts)
    ]


def blocks() -> list[Any]:
    found = []
    for page in written():
        text = page.read_text("utf-8")
        if page in ELSEWHERE:  # of the page on trouble, what stands before the errors
            text = text.partition("\n### ")[0] if page == TROUBLE else ""
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(*match.groups(), id=f"{page.stem}:{line}"))
    return found


def entries() -> dict[str, str | None]:
    """What raises each error, by its name; ``None`` for an entry without code."""
    parts = re.split(r"^### (\w+)$", TROUBLE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        match = BLOCK.search(text)
        found[name] = match.group(1) if match else None
    return found


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What a page's code is run in, as a reader runs it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    errors.warned.clear()
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    with forgotten():
        yield module
    vars(module).clear()  # classes are remembered, and would keep all that their script had
    torch.set_default_dtype(before)


def run(code: str, script: ModuleType) -> None:
    exec(compile(code, "page.py", "exec"), vars(script))


@pytest.mark.parametrize(("code", "printed"), blocks())
def test_code_runs(
    code: str, printed: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block runs when it is pasted alone, and prints what the page says it prints."""
    if peer := PEER.search(code):
        pytest.importorskip(peer[1], exc_type=ImportError)
        warnings.filterwarnings("ignore", module=peer[1])  # it warns in every classification
    run(code, script)
    assert capsys.readouterr().out.strip() == dedent(printed).strip()


def test_code_is_not_cut() -> None:
    """No line of code is wider than its box."""
    for page in written():
        text = page.read_text("utf-8")
        fenced = re.findall(r"^```[a-z]+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        indented = re.findall(r"(?:(?<=\n\n)|\A)((?:    [^\n]*\n)+)", text)
        lines = [line for part in fenced for line in part.splitlines()]
        lines += [line[4:] for part in indented for line in part.splitlines()]
        assert not [line for line in lines if len(line) > WIDTH], page


LOOKS_RUNNABLE = re.compile(
    r"^ {4,}(with .*:$|from \w+.* import |import \w|\w+ = \w+\(|print\()", re.MULTILINE
)


def test_what_looks_runnable_runs() -> None:
    """Python stands in blocks that say so; an import alone may show where a name comes from."""
    for page in written():
        text = page.read_text("utf-8")
        fences = re.findall(r"^ *```+([^`\n]+)$", text, re.MULTILINE)
        assert not [kind for kind in fences if kind.startswith("py") and kind != "python"], page
        text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        found = [match.group() for match in LOOKS_RUNNABLE.finditer(text)]
        assert all("backpack_core.extensions import" in line for line in found), page


def public_errors() -> dict[str, type]:
    """Of all packages of the library that are installed, by name."""
    found = {}
    for package in pkgutil.iter_modules():
        if package.name.startswith("backpack_") and not package.name.startswith("backpack_plugin_"):
            root = importlib.import_module(package.name)
            for module in pkgutil.walk_packages(root.__path__, f"{package.name}."):
                if not module.name.startswith(("backpack_core.testing", "backpack_core.cli")):
                    found.update(names_of(module.name))
    bases = (errors.BackpackError, errors.BackpackWarning)
    return {
        kind.__name__: kind
        for kind in found.values()
        if inspect.isclass(kind) and issubclass(kind, bases) and not kind.__name__.startswith("_")
    }


def names_of(module: str) -> dict[str, Any]:
    """What a module defines; nothing if it is for users of a package that is not installed."""
    try:
        return vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("backpack"):
            raise
        return {}


def test_every_error_has_an_entry() -> None:
    assert set(entries()) == set(public_errors())


def test_every_message_leads_to_its_entry() -> None:
    """Also that of a plugin's own subclass, to what it derives from."""

    class Mine(errors.UnsupportedError):
        __module__ = "backpack_plugin_mine"

    found = public_errors() | {"Mine": Mine}
    for name, kind in found.items():
        if issubclass(kind, errors.BackpackError):
            (note,) = kind("no", "more").__notes__  # type: ignore[attr-defined,unused-ignore]
        else:
            with pytest.warns(kind) as caught:
                errors.warn("no", kind)
            note = str(caught[0].message).rpartition("\n")[2]
        command, entry = note.rsplit(" ", 1)
        assert command == "Read more: backpack trouble"
        assert entry == ("UnsupportedError" if kind is Mine else name)
        assert trouble(entry)


def test_the_command_prints_an_entry_and_knows_near_misses() -> None:
    found = trouble("backpack_core.errors.SampleMixingError:")
    assert found.startswith("SampleMixingError\n\nSamples of the batch")
    assert "##" not in trouble("BackpackError")
    with pytest.raises(errors.UsageError, match="did you mean 'SampleMixingError'"):
        trouble("SampleMixError")


@pytest.mark.parametrize("name", [name for name, code in entries().items() if code])
def test_code_raises_what_it_stands_under(name: str, script: ModuleType) -> None:
    kind = public_errors()[name]
    code = entries()[name]
    assert code is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind) as caught:
            run(code, script)
    assert type(caught.value) is kind, caught.value
