"""Prints tables and JSON. Imports rich."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")

_COLOURS = {
    "loaded": "green",
    "rule": "green",
    "fast": "green",
    "autodiff": "yellow",
    "blocked": "yellow",
    "warning": "yellow",
    "failed": "red",
    "conflict": "red",
    "hangs": "red",
    "died": "red",
    "refused": "red",
    "fault": "red",
}


def console() -> Console:
    """Standard output. When piped, without colour and as wide as its content."""
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)


def width() -> int:
    """Columns of the terminal, a hundred at most; also when piped, for who reads it."""
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], wide: int | None = None
) -> None:
    """Print aligned columns; known words of state get their colour.

    Args:
        header: Names of the columns.
        rows: The cells.
        wide: How many characters there are; default: as many as needed, when piped.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*[_styled(cell) for cell in row])
    console().print(table, width=wide)


def _styled(cell: str) -> str:
    from rich.markup import escape

    colour = _COLOURS.get(cell)
    return f"[{colour}]{cell}[/{colour}]" if colour else escape(cell)


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar on the terminal meanwhile; without one where nobody looks on.

    Args:
        items: What takes long, one by one.
        what: What is done.
        total: How many there are; default: their number.
    """
    from rich.progress import track as tracked

    bar = Console(stderr=True)
    yield from tracked(
        items, what, total, console=bar, transient=True, disable=not sys.stderr.isatty()
    )


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal, which the function it gives moves on; none where nobody looks on.

    Args:
        what: What is done.
        total: How many steps there are.
    """
    from rich.progress import Progress

    hidden = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def print_json(value: Any) -> None:
    """Print machine-readable output."""
    print(json.dumps(value, indent=2))


def say(text: str) -> None:
    """Print a sentence as it is."""
    console().print(text, markup=False, soft_wrap=True)
