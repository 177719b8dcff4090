"""Documentation that is generated from the code agrees with the code."""

import re
import runpy
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
