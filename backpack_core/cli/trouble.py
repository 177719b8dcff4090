"""What the manual says of an error, by its name. Imports core."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import partial

from backpack_core.cli.shipped import shipped
from backpack_core.errors import UsageError, nearest


def entries() -> dict[str, str]:
    """The entries of the troubleshooting page: what stands under the name of each error."""
    page = shipped("troubleshooting.md", "docs/troubleshooting.md").read_text("utf-8")
    parts = re.split(r"^### (\w+)\n", page, flags=re.MULTILINE)[1:]
    return {
        name: re.split(r"^## ", text, flags=re.MULTILINE)[0].strip()
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def trouble(name: str) -> str:
    """What the manual says of an error or a warning.

    Args:
        name: Name of the class, in any case.

    Raises:
        UsageError: There is no such entry.
    """
    known = entries()
    wanted = name.strip(" :").rpartition(".")[2]
    by_lower = {own.lower(): own for own in known}
    if wanted.lower() not in by_lower:
        near = nearest(wanted, known) or f": there are {', '.join(known)}."
        raise UsageError(f"No error of this library is called {wanted!r}{near}")
    return known[by_lower[wanted.lower()]]


def plain(markdown: str, width: int) -> Iterator[str]:
    """Lines for a terminal: paragraphs are wrapped, code is indented, links name pages.

    Args:
        markdown: A section of a page.
        width: Columns of the terminal.
    """
    for number, part in enumerate(re.split(r"^```.*(?:\n|$)", markdown, flags=re.MULTILINE)):
        if number % 2:
            yield from (f"    {line}".rstrip() for line in part.splitlines())
            continue
        for paragraph in part.strip().split("\n\n"):
            text = re.sub(
                r"\[([^]]*)\]\(([\w/-]+)[^)]*\)", r"\1 (documentation: \2)", paragraph
            ).replace("**", "")
            yield from ("", *_paragraph(text.replace("`", ""), width), "")


def _paragraph(text: str, width: int) -> list[str]:
    """A paragraph, or the items of a list, each on lines of its own."""
    items = re.split(r"\n(?=- )", text)
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False, break_long_words=False)
    return [
        line
        for each in items
        for line in wrap(each, subsequent_indent="  " * each.startswith("- "))
    ]
