"""Tables in a box that scrolls by itself, so that a page never does sideways."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def _wrap(app: Sphinx, tree: nodes.document, name: str) -> None:
    for table in list(tree.findall(nodes.table)):
        if "table-wrapper" not in (table.parent.get("classes") or []):
            box = nodes.container(classes=["scrolls"])
            table.replace_self(box)
            box += table


def setup(app: Sphinx) -> dict[str, Any]:
    """Wrap once references are resolved."""
    app.connect("doctree-resolved", _wrap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
