"""Code that replaces a recorded graph's, if it can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backpack_capture.program import Program

Run = Callable[..., Sequence[Tensor]]


class NotCompiled(Exception):
    """Compilation failed or is impossible. The recorded graph runs unchanged."""


class Compilation(Protocol):
    """Code that is being compiled.

    Attributes:
        said: Its state, for a report.
    """

    @property
    def said(self) -> str:
        """How far it is, or how it was compiled."""

    def wait(self, timeout: float | None) -> None:
        """Return when the code is ready, or after ``timeout`` seconds."""

    def take(self) -> Run | None:
        """The code; ``None`` if it is not ready yet.

        Raises:
            NotCompiled: Compilation failed.
        """


# Begins to compile a program for arguments.
Begin = Callable[[Program, Sequence[Tensor]], Compilation]


@dataclass(frozen=True)
class Compiler:
    """How recorded graphs are compiled.

    Attributes:
        begin: Begins a compilation.
        splits: Whether products are recorded in pieces that fit the cache, as without a compiler.
            A compiler of kernels chooses its own sizes.
    """

    begin: Begin
    splits: bool = True
