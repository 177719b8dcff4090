"""Documentation that is generated from the code agrees with the code."""

import ast
import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if not {"_build", "api"} & set(page.relative_to(ROOT).parts)]


def test_extensions_page_is_up_to_date():
    generator = runpy.run_path(str(DOCS / "make_reference.py"))
    found = (DOCS / "extensions.md").read_text(encoding="utf-8")
    assert found == generator["page"](), "run python docs/make_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = page.parent / target
        if path.parent.name == "gallery":  # pages that are made from scripts
            path = ROOT / "examples" / "gallery" / f"{path.stem}.py"
            path = path.with_name("GALLERY_HEADER.rst") if path.stem == "index" else path
        assert path.exists(), f"{page.name} links to {target}"


BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("authors/*.md"))]


def imported(page):
    """What the code of a page imports of ours, as ``(module, name)``."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("backpack"):
                names = [alias.name for alias in node.names if alias.name != "NoSuchQuantity"]
                yield from ((node.module, name) for name in names)


@pytest.fixture(scope="module")
def reference():
    """What has an entry, and the modules whose names have one."""
    pages = runpy.run_path(str(DOCS / "_ext" / "api_pages.py"))
    values = [v for page in pages["PAGES"] for _, v in pages["entries"](page)]
    modules = {name for page in pages["PAGES"] for name in page.modules}
    return {id(value): value for value in values}, modules


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_guide_imports_is_in_the_reference(page, reference):
    """A name may be imported from another module than the one that its entry names."""
    known, modules = reference
    missing = [
        f"{module}.{name}"
        for module, name in imported(page)
        if f"{module}.{name}" not in modules
        and id(getattr(import_module(module), name)) not in known
    ]
    assert missing == []
