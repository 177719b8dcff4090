"""The command ``backpack``. It needs the extra ``cli``, and says so if that is missing."""

from __future__ import annotations

import sys

_NEEDED = {"typer", "click", "rich"}


def main() -> None:
    """Run the command; the entry point of the console script."""
    try:
        from backpack_core.cli.app import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        sys.exit(
            f"The backpack command needs {error.name}, which is not installed. Run "
            "`pip install 'backpack-core[cli]'`."
        )
    run()
