"""Code that takes the place of a recorded graph's, where it can be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from backpack_capture.program import Program

Run = Callable[..., Sequence[Tensor]]


class NotCompiled(Exception):
    """There will be no such code. The recorded graph runs as it is."""


class Compilation(Protocol):
    """Code that is under way.

    Attributes:
        said: What becomes of it, for a report.
    """

    @property
    def said(self) -> str:
        """How far it is, or how it was made."""

    def take(self) -> Run | None:
        """The code; ``None`` if it is not there yet.

        Raises:
            NotCompiled: There will be none.
        """


# Begins to compile a program for arguments.
Begin = Callable[[Program, Sequence[Tensor]], Compilation]
