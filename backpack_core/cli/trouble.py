"""What the manual says of an error, by its name. Imports core."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from backpack_core.errors import BackpackError, UsageError


def entries() -> dict[str, str]:
    """The entries of the troubleshooting page: what stands under the name of each error."""
    parts = re.split(r"^### (\w+)\n", _page(), flags=re.MULTILINE)[1:]
    return {
        name: re.split(r"^## ", text, flags=re.MULTILINE)[0].strip()
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def trouble(name: str) -> str:
    """What the manual says of an error or a warning.

    Args:
        name: Name of the class.

    Raises:
        UsageError: There is no such entry.
    """
    known = entries()
    name = name.strip(":").rpartition(".")[2]
    if name not in known:
        close = get_close_matches(name, known, 2, 0.6)
        near = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}."
        raise UsageError(f"No error of this library is called {name!r}: {near}")
    return known[name]


def _page() -> str:
    """The page: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parent / "docs"):
        if (folder / "troubleshooting.md").is_file():
            return (folder / "troubleshooting.md").read_text("utf-8")
    raise BackpackError("The manual is missing from this installation of backpack-core.")
