"""Matrices with eigenvectors in Kronecker form and any eigenvalues, as ``param.ekfac``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_products.values import any_of, at_least_single
from backpack_secondorder.linalg import multiply
from backpack_secondorder.matrix import CurvatureMatrix, Number, ParameterOrder
from backpack_secondorder.matrix_arguments import (
    check_damping,
    check_finite,
    check_same,
    check_scalar,
)


class KroneckerEigenbasis(CurvatureMatrix):
    """``Q diag(λ) Qᵀ`` with ``Q = Q₁ ⊗ Q₂ ⊗ …``, one block for each group of a layer.

    Sums exist for matrices with the same eigenvectors. To get corrected eigenvalues of a data set,
    fix the eigenvectors first: the factors over all of it, then ``EKFAC(basis=...)``.

    Attributes:
        vectors: Orthogonal factors ``Q_k``, of shape ``[D_k, D_k]``, or ``[G, D_k, D_k]`` for a
            layer with groups; ``None`` for the identity.
        values: The eigenvalues, ``[D_1, D_2, …]`` or ``[G, D_1, D_2, …]``.
    """

    def __init__(
        self, vectors: Sequence[Tensor | None], values: Tensor, order: ParameterOrder
    ) -> None:
        """Store the decomposition.

        Args:
            vectors: See the class.
            values: See the class.
            order: How the parameter's entries are numbered.
        """
        self.vectors = list(vectors)
        self.values = values
        self.order = order

    @property
    def sizes(self) -> list[int]:
        """The number of groups, and the size of every factor."""
        groups = [] if self.values.dim() > len(self.vectors) else [1]
        return [*groups, *self.values.shape]

    def tensors(self) -> dict[str, Tensor]:
        """The eigenvalues, and the eigenvectors that are not the identity."""
        vectors = {f"vectors.{k}": q for k, q in enumerate(self.vectors) if q is not None}
        return {"values": self.values, **vectors}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KroneckerEigenbasis:
        """A matrix with other eigenvalues and eigenvectors."""
        vectors = [tensors.get(f"vectors.{k}") for k in range(len(self.vectors))]
        values = tensors["values"]
        return KroneckerEigenbasis(vectors, values, self.order.on(values.device))

    def with_values(self, values: Tensor) -> KroneckerEigenbasis:
        """A matrix with the same eigenvectors and other eigenvalues."""
        return KroneckerEigenbasis(self.vectors, values, self.order)

    def eigenbasis(self) -> KroneckerEigenbasis:
        """Return the matrix itself."""
        return self

    def rotate(self, vectors: Tensor) -> Tensor:
        """``Qᵀ`` times vectors, ``[*θ]`` or ``[V, *θ]``: coordinates ``[V, P]``."""
        transposed = [None if q is None else q.mT for q in self.vectors]
        return multiply(transposed, self.sizes, self.order.coordinates(vectors))

    def matmul(self, vectors: Tensor) -> Tensor:
        """``Q diag(λ) Qᵀ`` times vectors. Shape ``[*θ]`` or ``[V, *θ]``, like the result."""
        return self._back(self.rotate(vectors) * self.values.flatten(), vectors)

    def apply(self, function: Callable[[Tensor], Tensor]) -> KroneckerEigenbasis:
        """``Q diag(f(λ)) Qᵀ``: a power of the matrix, for example, or clamped eigenvalues."""
        return self.with_values(function(self.values))

    def damped(self, damping: Number) -> KroneckerEigenbasis:
        """``Q diag(λ + damping) Qᵀ``, exactly.

        Raises:
            UsageError: An eigenvalue is not finite, or the damping is negative.
        """
        check_finite("matrix", self.values, self.order)
        return self.with_values(self.values + check_damping(damping))

    def inverse(self, damping: Number = 0.0) -> KroneckerEigenbasis:
        """``Q diag(1 / (λ + damping)) Qᵀ``, exactly.

        Raises:
            UsageError: An eigenvalue is zero or not finite after damping, or the damping is
                negative.
        """
        values = self.damped(damping).values
        if any_of(values == 0):
            raise UsageError(
                f"The matrix of {self.order} is singular with damping={damping}: increase damping."
            )
        return self.with_values(values.reciprocal())

    def scaled(self, scalar: Number) -> KroneckerEigenbasis:
        """``Q diag(scalar · λ) Qᵀ``."""
        return self.with_values(self.values * check_scalar(scalar))

    def plus(self, other: KroneckerEigenbasis) -> KroneckerEigenbasis:
        """``Q diag(λ + μ) Qᵀ``, the sum of both matrices.

        Raises:
            UsageError: Their eigenvectors differ.
            ShapeError: They belong to parameters of different shapes.
        """
        check_same(self, other)
        if not self.has_vectors_of(other):
            raise UsageError(
                "Corrected eigenvalues can be added in one basis, but these matrices have "
                "different eigenvectors: first add the Kronecker factors of all data, take their "
                "eigenbasis(), and pass it to EKFAC(basis=...) in a second pass."
            )
        return self.with_values(self.values + other.values)

    def has_vectors_of(self, other: KroneckerEigenbasis) -> bool:
        """Whether both have the same eigenvectors."""
        if self.values.shape != other.values.shape or len(self.vectors) != len(other.vectors):
            return False
        pairs = zip(self.vectors, other.vectors, strict=True)
        return all(
            p is q or (p is not None and q is not None and torch.equal(p, q)) for p, q in pairs
        )

    def root_times_noise(self, count: int | None, generator: torch.Generator | None) -> Tensor:
        """``Q diag(√λ) ε`` with standard normal ``ε``: a draw with this covariance.

        Args:
            count: How many draws; ``None`` for one, without axis ``V``.
            generator: The source of random numbers; default: torch's.

        Raises:
            UsageError: An eigenvalue is negative, or the number of draws is not a whole number.
        """
        if count is not None and (type(count) is not int or count < 0):
            raise UsageError(f"count must be a whole number, or None for one draw. Got {count!r}.")
        if any_of(self.values < 0):
            raise UsageError(
                "A Gaussian needs a positive matrix, but this one has negative eigenvalues: "
                "increase the damping."
            )
        shape = [] if count is None else [count]
        like = self.values.new_empty(*shape, *self.order.shape)
        noise = torch.randn(
            (1 if count is None else count, self.order.shape.numel()),
            generator=generator,
            dtype=like.dtype,
            device=like.device,
        )
        return self._back(noise * self.values.flatten().sqrt(), like)

    def diagonal(self) -> Tensor:
        """``Σ_i Q[p, i]² λ_i``. Shape ``[*θ]``."""
        squares = [None if q is None else q.square() for q in self.vectors]
        flat = multiply(squares, self.sizes, self.values.reshape(1, -1))
        return self.order.vectors(flat, flat.new_empty(self.order.shape))

    def trace(self) -> Tensor:
        """Sum of the eigenvalues."""
        return at_least_single(self.values).sum().to(self.values.dtype)

    def dense(self) -> Tensor:
        """The matrix in the parameter's order, ``[P, P]``: for tests and small layers."""
        size = self.order.shape.numel()
        eye = torch.eye(size, dtype=self.values.dtype, device=self.values.device)
        return self.matmul(eye.reshape(size, *self.order.shape)).reshape(size, size)

    def _back(self, coordinates: Tensor, like: Tensor) -> Tensor:
        return self.order.vectors(multiply(self.vectors, self.sizes, coordinates), like)

    def __repr__(self) -> str:
        """Shape of the parameter and sizes of the factors."""
        return f"<KroneckerEigenbasis {list(self.values.shape)} for {list(self.order.shape)}>"
