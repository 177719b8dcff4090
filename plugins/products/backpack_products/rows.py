"""The inputs that a weight multiplies, ``[N, S, G, I]``: a tensor, or an object that creates them.

The patches of a convolution are many times as large as its input, so they are created for some
samples at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Inputs ``[N, S, G, I]``, sliced by sample: a tensor, or an object that creates them."""

    @property
    def shape(self) -> torch.Size:
        """``[N, S, G, I]``."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples, ``[n, S, G, I]``."""


def whole(inp: Rows) -> Tensor:
    """The inputs of all samples; a tensor itself, since slicing it takes as long as a kernel."""
    return inp if isinstance(inp, Tensor) else inp[:]


def tensors_behind(inp: Any) -> list[Tensor]:
    """The tensors that inputs are, or that they are created from."""
    if isinstance(inp, Tensor):
        return [inp]
    inner = inp if isinstance(inp, tuple) else vars(inp).values() if is_made(inp) else ()
    return [tensor for item in inner for tensor in tensors_behind(item)]


def is_made(inp: Any) -> bool:
    """Whether a value may be inputs that are created from tensors among its attributes."""
    return hasattr(inp, "__getitem__") and hasattr(inp, "shape") and hasattr(inp, "__dict__")


class JoinedRows:
    """The inputs of several calls of one map, concatenated along positions.

    Attributes:
        parts: The inputs of each call.
    """

    def __init__(self, *parts: Rows) -> None:
        """Store the inputs of each call, ``[N, S_p, G, I]``."""
        self.parts = parts
        samples, _, *rest = parts[0].shape
        self.shape = torch.Size((samples, sum(part.shape[1] for part in parts), *rest))

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples, ``[n, Σ_p S_p, G, I]``."""
        return torch.cat([part[rows] for part in self.parts], 1)


class CastRows:
    """Inputs ``[N, S, G, I]`` in another dtype, for some samples at a time."""

    def __init__(self, inp: Rows, dtype: torch.dtype) -> None:
        """Store the inputs."""
        self.inp, self.dtype, self.shape = inp, dtype, inp.shape

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples."""
        return self.inp[rows].to(self.dtype)


def cast(inp: Rows, dtype: torch.dtype) -> Rows:
    """Inputs in another dtype; those that are created, when they are."""
    return inp.to(dtype) if isinstance(inp, Tensor) else CastRows(inp, dtype)


class DirectRows(ABC):
    """Inputs with a kernel that computes ``M`` without creating the inputs of each position."""

    shape: torch.Size

    @abstractmethod
    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples, ``[n, S, G, I]``."""

    @abstractmethod
    def suits(self, columns: int, out: Tensor) -> bool:
        """Whether the kernel exists, and is faster, for a number of columns at a time."""

    @abstractmethod
    def total(self, out: Tensor) -> Tensor | None:
        """``Σ_n M``, ``[V, G, O, I]``, for columns ``[V, N, S, G, O]``; ``None`` if unsupported."""

    @abstractmethod
    def position_sum(self) -> Tensor:
        """``Σ_s inp``, ``[N, G, I]``."""

    @abstractmethod
    def product(self, out: Tensor, rows: slice) -> Tensor:
        """``M``, ``[n·G, v·O, I]``, for columns ``[v, n, S, G, O]`` of the samples ``rows``."""

    def gram_size(self) -> int:
        """How many numbers :meth:`gram` holds for a sample; 0 if inputs of each position do it."""
        return 0

    def gram(self, rows: slice) -> Tensor:
        """``⟨inp_s, inp_t⟩``, ``[n·G, S, S]``, of some samples."""
        raise NotImplementedError
