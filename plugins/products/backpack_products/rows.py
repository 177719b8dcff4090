"""The inputs that a weight multiplies, ``[N, S, G, I]``: a tensor, or an object that makes them.

The patches of a convolution are many times as large as its input, so they are made for some samples
at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Inputs ``[N, S, G, I]``, possibly made for the samples one asks for. A tensor is one, too."""

    @property
    def shape(self) -> torch.Size:
        """``[N, S, G, I]``."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples, ``[n, S, G, I]``."""


def whole(inp: Rows) -> Tensor:
    """The inputs of all samples; a tensor as it is, since to cut it takes a kernel's time."""
    return inp if isinstance(inp, Tensor) else inp[:]


class JoinedRows:
    """The inputs of several calls of one map, with their positions side by side.

    Attributes:
        parts: The inputs of each.
    """

    def __init__(self, *parts: Rows) -> None:
        """Store them, ``[N, S_p, G, I]`` each."""
        self.parts = parts
        samples, _, *rest = parts[0].shape
        self.shape = torch.Size((samples, sum(part.shape[1] for part in parts), *rest))

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples, ``[n, Σ_p S_p, G, I]``."""
        return torch.cat([part[rows] for part in self.parts], 1)


class DirectRows(ABC):
    """Inputs with a kernel that forms ``M`` without forming what each position sees."""

    shape: torch.Size

    @abstractmethod
    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples, ``[n, S, G, I]``."""

    @abstractmethod
    def suits(self, columns: int, out: Tensor) -> bool:
        """Whether the kernel exists, and is faster, for that many columns at a time."""

    @abstractmethod
    def total(self, out: Tensor) -> Tensor | None:
        """``Σ_n M``, ``[V, G, O, I]``, of columns ``[V, N, S, G, O]``, if a kernel has it."""

    @abstractmethod
    def position_sum(self) -> Tensor:
        """``Σ_s inp``, ``[N, G, I]``."""

    @abstractmethod
    def product(self, out: Tensor, rows: slice) -> Tensor:
        """``M`` of some columns ``[v, n, S, G, O]`` of the samples ``rows``, ``[n·G, v·O, I]``."""
