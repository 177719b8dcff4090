"""Code that takes the place of a recorded graph's, where it can be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    def wait(self, timeout: float | None) -> None:
        """Return when it is there, or after ``timeout`` seconds."""

    def take(self) -> Run | None:
        """The code; ``None`` if it is not there yet.

        Raises:
            NotCompiled: There will be none.
        """


# Begins to compile a program for arguments.
Begin = Callable[[Program, Sequence[Tensor]], Compilation]


@dataclass(frozen=True)
class Compiler:
    """How recorded graphs are compiled.

    Attributes:
        begin: Begins.
        splits: Whether products are recorded in pieces that fit the cache, as without it. A
            compiler of kernels finds sizes of its own.
    """

    begin: Begin
    splits: bool = True
