"""Tables that fit any width: on a phone, each row is a card, and a row of a wide table folds.

A cell carries the name of its column, which only a phone shows. Of a table with many columns, a
phone shows a line for each row, which opens: the columns, by what they hold.
"""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

WIDE = 9  # columns that are too many for a card


def _wrap(app: Sphinx, tree: nodes.document, name: str) -> None:
    for table in list(tree.findall(nodes.table)):
        rows = [list(row.findall(nodes.entry)) for row in table.findall(nodes.row)]
        header = [entry.astext() for entry in rows[0]]
        wide = len(header) >= WIDE
        box = table.parent
        if "table-wrapper" not in (box.get("classes") or []):  # which the theme puts around
            box = nodes.container()
            table.replace_self(box)
            box += table
        box["classes"] += ["scrolls", "wide" if wide else "cards-on-phones"]
        if wide:
            folded = "".join(_fold(header, [cell.astext() for cell in row]) for row in rows[1:])
            text = f'<div class="folded">{folded}</div>'
            box.parent.insert(box.parent.index(box) + 1, nodes.raw("", text, format="html"))
        else:
            for row in rows[1:]:
                _label(header, row)


def _label(header: list[str], row: list[nodes.entry]) -> None:
    """Put the name of the column into each cell but the first."""
    for column, cell in list(zip(header, row, strict=False))[1:]:
        first = cell[0] if cell.children else None
        if column and isinstance(first, nodes.TextElement):
            first.insert(0, nodes.inline("", f"{column}: ", classes=["column"]))


def _fold(header: list[str], row: list[str]) -> str:
    """One row as a line that opens: for each value, the columns that hold it."""
    holders: dict[str, list[str]] = {}
    for column, value in list(zip(header, row, strict=False))[1:]:
        holders.setdefault(value, []).append(column)
    lines = "".join(
        f"<p><strong>{escape(value)}</strong>: {escape(', '.join(columns))}</p>"
        for value, columns in holders.items()
    )
    found = escape(", ".join(holders))
    return f"<details><summary>{escape(row[0])} <small>{found}</small></summary>{lines}</details>"


def setup(app: Sphinx) -> dict[str, Any]:
    """Wrap once references are resolved."""
    app.connect("doctree-resolved", _wrap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
