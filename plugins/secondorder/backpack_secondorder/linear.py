"""Symmetric matrices over several parameters, given by their products with vectors.

Vectors have one of four forms, and results have the same form: a flat vector, ``[P]``; flat vectors
as columns of a matrix, ``[P, V]``; a list with a tensor ``[*θ]`` for each parameter; a list with
several vectors, ``[V, *θ]``. Imports torch; scipy only in ``to_scipy``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from backpack_core.errors import ShapeError, UsageError

if TYPE_CHECKING:
    import scipy.sparse.linalg


class LinearOperator(ABC):
    """A symmetric matrix ``[P, P]`` over parameters with ``P`` entries in all.

    Attributes:
        shapes: Shape of each parameter, in the order of the rows.
    """

    shapes: tuple[torch.Size, ...]

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The precision of the parameters."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the parameters are."""

    @abstractmethod
    def products(self, vectors: list[Tensor]) -> list[Tensor]:
        """The matrix times vectors ``[V, *θ]`` for each parameter, in the same form."""

    @property
    def shape(self) -> torch.Size:
        """``[P, P]``."""
        size = sum(shape.numel() for shape in self.shapes)
        return torch.Size([size, size])

    @overload
    def __matmul__(self, vectors: Tensor) -> Tensor: ...

    @overload
    def __matmul__(self, vectors: Sequence[Tensor]) -> list[Tensor]: ...

    def __matmul__(self, vectors: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Multiply.

        Args:
            vectors: In one of the forms of this module.

        Returns:
            The products in the same form.

        Raises:
            ShapeError: The shapes fit none of the forms.
            UsageError: The vectors have another precision or device than the parameters.
        """
        if isinstance(vectors, Tensor):
            return self._flat(vectors, self.products)
        return self._lists(vectors, self.products)

    def dense(self) -> Tensor:
        """The matrix, ``[P, P]``: for tests and small models."""
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
        """A scipy ``LinearOperator``, for ``eigsh``, ``cg`` and others.

        Vectors are converted from numpy to the parameters' precision and device, and back.

        Raises:
            ModuleNotFoundError: scipy is not installed.
        """
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def multiply(array: Any) -> Any:
            vectors = torch.from_numpy(array.copy()).to(self.device, self.dtype)
            return (self @ vectors).detach().cpu().to(wide).numpy()

        # numpy does not know bfloat16.
        wide = self.dtype if self.dtype.itemsize >= 4 else torch.float32
        return ScipyOperator(
            shape=tuple(self.shape),
            matvec=lambda x: multiply(x.reshape(-1)),
            rmatvec=lambda x: multiply(x.reshape(-1)),
            matmat=multiply,
            rmatmat=multiply,
            dtype=torch.empty(0, dtype=wide, device="cpu").numpy().dtype,
        )

    def _flat(self, vectors: Tensor, function: Any) -> Tensor:
        """A function of lists ``[V, *θ]``, for ``[P]`` or ``[P, V]``."""
        if vectors.dim() not in (1, 2) or len(vectors) != self.shape[0]:
            raise ShapeError(
                f"Expected a vector [{self.shape[0]}], a matrix [{self.shape[0]}, V], or a list "
                f"of tensors, one for each parameter. Got a tensor {list(vectors.shape)}."
            )
        self._check([vectors])
        rows = vectors.reshape(self.shape[0], -1).T
        parts = zip(function(self.split(rows)), self.shapes, strict=True)
        flat = torch.cat([part.reshape(len(rows), shape.numel()) for part, shape in parts], 1)
        return flat.T.reshape(vectors.shape)

    def _lists(self, given: Sequence[Tensor], function: Any) -> list[Tensor]:
        """A function of lists ``[V, *θ]``, for lists of ``[*θ]`` or ``[V, *θ]``."""
        vectors = list(given) if isinstance(given, Iterable) else [given]
        if isinstance(given, Mapping):
            raise ShapeError(
                "Expected a list of tensors, one for each parameter. Got a mapping of type "
                f"{type(given).__name__}: write [*vectors.values()], in the order of the blocks."
            )
        if not all(isinstance(v, Tensor) for v in vectors):
            raise ShapeError(
                f"Expected a tensor [{self.shape[0]}] or [{self.shape[0]}, V], or a list of "
                f"tensors, one for each parameter. Got {given!r:.80} of type "
                f"{type(given).__name__}."
            )
        shapes = tuple(vector.shape for vector in vectors)
        if shapes == self.shapes:
            self._check(vectors)
            return [part.squeeze(0) for part in function([v.unsqueeze(0) for v in vectors])]
        counts = {shape[0] for shape in shapes if len(shape)}
        if tuple(shape[1:] for shape in shapes) != self.shapes or len(counts) != 1:
            raise ShapeError(
                "Expected a tensor for each parameter, of shapes "
                f"{[list(shape) for shape in self.shapes]}, or several as [V, *shape]. Got "
                f"{[list(shape) for shape in shapes]}."
            )
        self._check(vectors)
        products: list[Tensor] = function(vectors)
        return products

    def split(self, rows: Tensor) -> list[Tensor]:
        """Flat vectors ``[V, P]`` as a list of ``[V, *θ]``."""
        ends = [0, *accumulate(shape.numel() for shape in self.shapes)]
        pairs = pairwise(ends)
        return [
            rows[:, start:stop].reshape(len(rows), *shape)
            for (start, stop), shape in zip(pairs, self.shapes, strict=True)
        ]

    def _check(self, vectors: Sequence[Tensor]) -> None:
        for vector in vectors:
            if vector.dtype != self.dtype or vector.device != self.device:
                raise UsageError(
                    f"The matrix is in {self.dtype} on {self.device}, but the vectors are in "
                    f"{vector.dtype} on {vector.device}: convert them with .to(...)."
                )
