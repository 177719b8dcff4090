"""What an earlier pass has found out about a graph, for later passes over graphs like it."""

from __future__ import annotations

from typing import Any


class Planning:
    """What is known before the graph of one pass is surveyed. Core alone knows nothing.

    A library derives from it.
    """

    def take(self, run: Any) -> bool:
        """Fill in the survey, and clear the results of earlier passes; returns whether it did.

        Args:
            run: The pass, before anything is surveyed.
        """
        return False

    def make(self, run: Any) -> None:
        """Note what the survey of a pass has found, before observers look at the pass."""

    def keep(self, run: Any) -> None:
        """Keep what was noted, since the pass went well."""
