"""Pages that the index does not name are listed where it says ``(further pages)``."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    if name == app.config.root_doc:
        listed = set(source[0].splitlines())
        pages = sorted(path.stem for path in Path(app.srcdir).glob("*.md"))
        further = [page for page in pages if page != name and page not in listed]
        source[0] = source[0].replace("(further pages)", "\n".join(further))


def setup(app: Sphinx) -> dict[str, bool]:
    """Listen for the index."""
    app.connect("source-read", _fill)
    # Read again in every build: what it says depends on which other pages there are.
    app.connect("env-get-outdated", lambda app, *_: [app.config.root_doc])
    return {"parallel_read_safe": True, "parallel_write_safe": True}
