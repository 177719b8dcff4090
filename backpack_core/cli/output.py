"""Prints sentences, tables and JSON, wrapped to the width of the terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_RED = ("failed", "conflict", "hangs", "died", "refused")
_COLOURS = {"loaded": "green", "blocked": "yellow", **dict.fromkeys(_RED, "red")}
_UNLIMITED = 10_000  # a pipe is as wide as what goes through it
_GAP = 2  # between columns


def terminal() -> int:
    """The columns of the terminal, or ``COLUMNS``; in a pipe, as many as needed."""
    return shutil.get_terminal_size((_UNLIMITED, 24)).columns


def width() -> int:
    """The columns for text that people read, also in a pipe: a hundred at most."""
    return min(100, terminal())


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], wide: int | None = None
) -> None:
    """Print aligned columns; if they do not fit side by side, print each cell on a line of its own.

    Args:
        header: Names of the columns.
        rows: The cells. Words for states are coloured.
        wide: The available width; default: that of the terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    wide, cells = wide or terminal(), [list(row) for row in rows]
    columns = [*zip(header, *cells, strict=True)]
    least = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    widths, room = [max(map(len, column)) for column in columns], wide - _GAP * (len(columns) - 1)
    if sum(least) > room:
        say("\n\n".join(_stacked(header, row, wide) for row in cells))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    while sum(widths) > room:  # the widest column that breaks no word becomes narrower
        pairs = enumerate(zip(widths, least, strict=True))
        widths[max((width, place) for place, (width, needed) in pairs if width > needed)[1]] -= 1
    for name, width in zip(header, widths, strict=True):
        table.add_column(name, width=width)
    for row in cells:
        table.add_row(*[Text(cell, _COLOURS.get(cell, "")) for cell in row])
    target = Console(width=wide, highlight=False)  # without colour in a pipe
    with target.capture() as printed:
        target.print(table)
    for line in printed.get().splitlines():
        print(line.rstrip())


def _stacked(header: Sequence[str], row: Sequence[str], wide: int) -> str:
    """A row as lines: its first cell, and below it the others that are not empty, with names."""
    others = [f"  {name}: {cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell]
    return "\n".join(wrapped(line, wide) for line in (row[0], *others))


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, with a progress bar if standard error is a terminal.

    Args:
        items: The items; each takes long.
        what: What is done.
        total: How many there are; default: their number.
    """
    from rich.console import Console
    from rich.progress import track as tracked

    bar, disable = Console(stderr=True), not sys.stderr.isatty()
    yield from tracked(items, what, total, console=bar, transient=True, disable=disable)


def print_json(value: Any) -> None:
    """Print machine-readable output."""
    print(json.dumps(value, indent=2, allow_nan=False))


def say(text: str) -> None:
    """Print sentences; on a terminal, lines break between words."""
    for line in text.split("\n"):
        print(wrapped(line, terminal()))


def wrapped(line: str, wide: int) -> str:
    """A line that is broken between words; further lines are indented by two more columns."""
    if len(line) <= wide:
        return line
    start = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line,
        wide,
        initial_indent="",
        subsequent_indent=f"{start}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
