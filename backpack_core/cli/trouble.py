"""Prints what the manual says about an error."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import partial

from backpack_core.cli.shipped import shipped
from backpack_core.errors import UsageError, nearest


def entries() -> dict[str, str]:
    """The entries of the troubleshooting page by name of the error.

    One entry has the message that Python raises for a result that does not exist.
    """
    page = shipped("troubleshooting.md", "docs/troubleshooting.md").read_text("utf-8")
    parts = re.split(r"^(##+) (.+)\n", page, flags=re.MULTILINE)[1:]
    sections = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {name: text.strip() for level, name, text in sections if level == "###" or "'" in name}


def trouble(name: str) -> str:
    """The name of an error or a warning, and what the manual says about it.

    Args:
        name: Name of the class, or a part of it, in any case; or a message that begins with it.

    Raises:
        UsageError: There is no such entry, or there are several.
    """
    by_name, words = entries(), re.findall(r"\w+", name.lower())
    names = [own for own in by_name if own.lower() in (*words, name.lower())]
    hits = {own: sum(len(w) > 3 and w in own.lower() for w in words) for own in by_name}
    names = names or [own for own in by_name if hits[own] == max(hits.values()) > 0]
    if len(names) == 1:
        return f"{names[0]}\n\n{by_name[names[0]]}"
    if names:
        raise UsageError(f"Several entries contain {name!r}: {', '.join(names)}.")
    near = nearest(name, by_name) or f": there are {', '.join(by_name)}."
    raise UsageError(f"No error of this library is called {name!r}{near}")


def plain(markdown: str, width: int) -> Iterator[str]:
    """Lines for a terminal: paragraphs are wrapped, code is indented, links become names of pages.

    Args:
        markdown: A section of a page.
        width: Columns of the terminal.
    """
    for number, part in enumerate(re.split(r"^```.*(?:\n|$)", markdown, flags=re.MULTILINE)):
        if number % 2:
            yield from (f"    {line}".rstrip() for line in (*part.splitlines(), ""))
            continue
        for paragraph in filter(None, part.strip().split("\n\n")):
            text = re.sub(
                r"\[([^]]*)\]\(([\w/-]+)[^)]*\)", r"\1 (documentation: \2)", paragraph
            ).replace("**", "")
            yield from (*_paragraph(text.replace("`", ""), width), "")


def _paragraph(text: str, width: int) -> list[str]:
    """The lines of a paragraph; each item of a list begins on a new line."""
    items = re.split(r"\n(?=- |\d+\. )", text)
    marks = [re.match(r"- |\d+\. ", each) for each in items]
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False, break_long_words=False)
    indents = [" " * len(mark[0] if mark else "") for mark in marks]
    return [
        line
        for each, indent in zip(items, indents, strict=True)
        for line in wrap(" ".join(each.split()), subsequent_indent=indent)
    ]
