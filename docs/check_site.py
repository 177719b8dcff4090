"""Checks a built site: every link inside it, and that nothing is fetched from elsewhere.

Run ``python docs/check_site.py docs/_build/html``. Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself, as opposed to what a reader may click on.
_FETCHED = {"img": "src", "script": "src", "source": "src", "iframe": "src", "video": "src"}


class Page(HTMLParser):
    """The anchors of a page, its links, and what it fetches."""

    def __init__(self, path: Path) -> None:
        """Read a page."""
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag says."""
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in {"stylesheet", "icon", "preload"}:
            self.fetched.append(values["href"])
        if tag in _FETCHED and _FETCHED[tag] in values:
            self.fetched.append(values[_FETCHED[tag]])


def faults(site: Path) -> Iterator[str]:
    """A line for everything that leads nowhere, or outside without being asked."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for link in page.fetched:
            if urlsplit(link).scheme not in {"", "data"} or link.startswith("//"):
                yield f"{where} fetches {link}"
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{where} links to {link}: there is no such file"
            elif unquote(parts.fragment) not in {"", *getattr(pages.get(target), "anchors", ())}:
                yield f"{where} links to {link}: there is no such place on the page"
    for sheet in site.rglob("*.css"):
        if "url(http" in sheet.read_text("utf-8").replace('"', ""):
            yield f"{sheet.relative_to(site)} fetches from another site"


def main() -> None:
    """Print what is wrong, and exit with 1 if anything is.

    Raises:
        SystemExit: A link leads nowhere, or there is no site.
    """
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        raise SystemExit(f"There is no site in {site}: run `make docs`.")
    found = sorted(set(faults(site)))
    print(
        "\n".join(found) or f"{len(list(site.rglob('*.html')))} pages, every link leads somewhere"
    )
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
