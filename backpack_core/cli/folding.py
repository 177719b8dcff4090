"""Folds a table of what is supported, so that layers with equal rows are printed together."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backpack_core.cli.support import Table

_MEANING = {
    "fast": "by a rule, without forming single gradients",
    "rule": "by a rule",
    "autodiff": "parameters where operations use them: exact",
    "graph": "from the graph of the loss",
    "-": "nothing to compute here",
    "refused": "no exact value, and why",
}


def folded(table: Table, width: int) -> Iterator[str]:
    """The lines of a folded table: for each group of equal rows, what is supported.

    Args:
        table: What is supported.
        width: Columns of the terminal, and the length of a line at most.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(table.rows):
        own = tuple(row[1 : table.first])  # the modules of a model have types and rules
        why = tuple(sorted(table.reasons[number].items()))
        key = (*own, "\0", *row[table.first :], "\0", *(f"{n}\1{text}" for n, text in why))
        groups.setdefault(key, []).append(number)
    for word, meaning in _MEANING.items():
        yield from _wrapped(f"{word:9} ", meaning, width)
    for members in groups.values():
        yield ""
        names = ", ".join(table.rows[number][0] for number in members)
        own_cells = table.rows[members[0]][1 : table.first]
        title = f"{names}: {own_cells[0]}, {own_cells[1]} of {own_cells[2]}" if own_cells else names
        yield from textwrap.wrap(title, width, subsequent_indent="    ")
        yield from _cells(table, members[0], width)


def _cells(table: Table, number: int, width: int) -> Iterator[str]:
    by_cell: dict[str, list[str]] = {}
    names, cells = table.header[table.first :], table.rows[number][table.first :]
    for name, cell in zip(names, cells, strict=True):
        by_cell.setdefault(cell, []).append(name)
    by_reason: dict[str, list[str]] = {}
    for name, reason in table.reasons[number].items():
        by_reason.setdefault(reason, []).append(name)
        by_cell["refused"].remove(name)
    for cell in sorted(by_cell, key=list(_MEANING).index):
        if by_cell[cell]:
            yield from _wrapped(f"  {cell:9}", ", ".join(by_cell[cell]), width)
    for reason, why in by_reason.items():
        text = f"{', '.join(why)}: {' '.join(reason.split())}"
        yield from textwrap.wrap(f"  refused  {text}", width, subsequent_indent="    ")


def _wrapped(label: str, text: str, width: int) -> list[str]:
    indent = " " * len(label)
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=indent)
