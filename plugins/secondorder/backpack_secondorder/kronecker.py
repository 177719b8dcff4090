"""Kronecker-factored curvature as a matrix: products, solves, eigenvalues.

What ``param.kfac`` is: still the list of factors, and an object one can multiply and solve with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod, sqrt

import torch
from torch import Tensor

from backpack_core.errors import ShapeError, UsageError
from backpack_core.values import any_of, at_least_single, without_autocast


@dataclass(frozen=True, eq=False)
class ParameterOrder:
    """How the entries of a parameter are numbered by the rows of a Kronecker product.

    Attributes:
        shape: Shape of the parameter, ``[*θ]``.
        positions: Where in the flattened parameter the row's entry lies, ``[P]``; ``None`` where
            rows follow the parameter's own order. (Transposed convolutions store ``[I, O]``.)
    """

    shape: torch.Size
    positions: Tensor | None = None

    def coordinates(self, vectors: Tensor) -> Tensor:
        """``[*θ]`` or ``[V, *θ]`` to ``[V, P]``, in the order of the rows.

        Raises:
            ShapeError: The vectors do not have the parameter's shape.
        """
        single = vectors.shape == self.shape
        if not single and vectors.shape[1:] != self.shape:
            raise ShapeError(
                f"Expected a vector of the parameter's shape {list(self.shape)}, or several as "
                f"[V, *shape]. Got {list(vectors.shape)}."
            )
        flat = vectors.reshape(1 if single else len(vectors), self.shape.numel())
        return flat if self.positions is None else flat[:, self.positions]

    def vectors(self, coordinates: Tensor, like: Tensor) -> Tensor:
        """Back from ``[V, P]`` to the shape of ``like``."""
        if self.positions is not None:
            coordinates = torch.empty_like(coordinates).index_copy(1, self.positions, coordinates)
        return coordinates.reshape(like.shape)

    def matrix(self, mat: Tensor) -> Tensor:
        """Rows and columns of ``[P, P]``, put into the parameter's order."""
        if self.positions is None:
            return mat
        inverse = self.positions.argsort()
        return mat[inverse][:, inverse]


class KroneckerEigenbasis:
    """``Q diag(λ) Qᵀ`` with ``Q = Q₁ ⊗ Q₂ ⊗ …``, one block for each group of a layer.

    Attributes:
        vectors: Orthogonal factors ``Q_k``, of shape ``[D_k, D_k]``, or ``[G, D_k, D_k]`` for a
            layer with groups.
        values: The eigenvalues, ``[D_1, D_2, …]`` or ``[G, D_1, D_2, …]``.
    """

    def __init__(self, vectors: Sequence[Tensor], values: Tensor, order: ParameterOrder) -> None:
        """Store the decomposition.

        Args:
            vectors: See the class.
            values: See the class.
            order: How the parameter's entries are numbered.
        """
        self.vectors = list(vectors)
        self.values = values
        self.order = order

    def clone(self) -> KroneckerEigenbasis:
        """The same in memory of its own."""
        return KroneckerEigenbasis(
            [q.clone() for q in self.vectors], self.values.clone(), self.order
        )

    def to(self, dtype: torch.dtype) -> KroneckerEigenbasis:
        """The same in another precision."""
        vectors = [q.to(dtype) for q in self.vectors]
        return KroneckerEigenbasis(vectors, self.values.to(dtype), self.order)

    def with_values(self, values: Tensor) -> KroneckerEigenbasis:
        """Other eigenvalues for the same eigenvectors."""
        return KroneckerEigenbasis(self.vectors, values, self.order)

    def rotate(self, vectors: Tensor) -> Tensor:
        """``Qᵀ`` times vectors, ``[*θ]`` or ``[V, *θ]``: coordinates ``[V, P]``."""
        return multiply([q.mT for q in self.vectors], self.order.coordinates(vectors))

    def matmul(self, vectors: Tensor) -> Tensor:
        """Multiply. Shape ``[*θ]`` or ``[V, *θ]``, as the result."""
        return self._apply(self.values, vectors)

    def solve(self, vectors: Tensor, damping: float = 0.0) -> Tensor:
        """Multiply with the inverse of the matrix plus ``damping`` times the identity.

        Args:
            vectors: Shape ``[*θ]`` or ``[V, *θ]``.
            damping: Must be positive where the matrix is singular.
        """
        return self._apply((self.values + check_damping(damping)).reciprocal(), vectors)

    def logdet(self, damping: float = 0.0) -> Tensor:
        """Logarithm of the determinant of the matrix plus ``damping`` times the identity."""
        return (self.values + check_damping(damping)).log().sum()

    def trace(self) -> Tensor:
        """Sum of the eigenvalues."""
        return self.values.sum()

    def dense(self) -> Tensor:
        """The matrix in the parameter's order, ``[P, P]``: for tests and small layers."""
        size = self.order.shape.numel()
        eye = torch.eye(size, dtype=self.values.dtype, device=self.values.device)
        return self.matmul(eye.reshape(size, *self.order.shape)).reshape(size, size)

    def _apply(self, values: Tensor, vectors: Tensor) -> Tensor:
        scaled = self.rotate(vectors) * values.flatten()
        return self.order.vectors(multiply(self.vectors, scaled), vectors)


class KroneckerFactors(list[Tensor]):
    """The factors of a Kronecker product ``F₁ ⊗ F₂ ⊗ …``, which approximates a curvature block.

    A list: ``param.kfac[0]``, ``len(param.kfac)`` and loops work as they do on the list of factors.
    A single factor is the block itself. The product has the order of the flattened parameter, with
    input and output axes of a transposed convolution exchanged; the methods below take and return
    vectors in the shape of the parameter, ``[*θ]`` or ``[V, *θ]``, whatever the order.

    For a layer with ``G > 1`` groups every factor of the weight has an axis ``[G, D, D]`` in front:
    one product for each group, and nothing between groups.
    """

    def __init__(self, factors: Iterable[Tensor], order: ParameterOrder) -> None:
        """Store the factors.

        Args:
            factors: Symmetric matrices ``[D_k, D_k]`` or ``[G, D_k, D_k]``.
            order: How the parameter's entries are numbered.

        Raises:
            ShapeError: The product of the sizes is not that of the parameter.
        """
        super().__init__(factors)
        self.order = order
        self._eigen: tuple[object, KroneckerEigenbasis] | None = None
        size = prod(f.shape[-1] for f in self) * self.groups
        if size != order.shape.numel():
            raise ShapeError(
                f"Kronecker factors of sizes {[list(f.shape) for f in self]} make a matrix of size "
                f"{size}, but the parameter of shape {list(order.shape)} has {order.shape.numel()} "
                "entries."
            )

    def __repr__(self) -> str:
        """Sizes of the factors, and what they stand for."""
        sizes = " ⊗ ".join(str(list(factor.shape)) for factor in self)
        return f"<Kronecker factors {sizes} of a parameter of shape {list(self.order.shape)}>"

    @property
    def groups(self) -> int:
        """Number of blocks ``G``."""
        return len(self[0]) if self[0].dim() == 3 else 1

    def to(self, dtype: torch.dtype) -> KroneckerFactors:
        """The same in another precision."""
        if all(factor.dtype == dtype for factor in self):
            return self
        return self.with_factors(factor.to(dtype) for factor in self)

    def with_factors(self, factors: Iterable[Tensor]) -> KroneckerFactors:
        """Other factors for the same parameter."""
        return KroneckerFactors(factors, self.order)

    def matmul(self, vectors: Tensor) -> Tensor:
        """Multiply with the Kronecker product, without forming it."""
        return self.order.vectors(multiply(self, self.order.coordinates(vectors)), vectors)

    def eigenbasis(self) -> KroneckerEigenbasis:
        """The eigendecomposition; computed once, and again where a factor was changed."""
        state = [(id(factor), factor._version) for factor in self]
        if self._eigen is None or self._eigen[0] != state:
            decompositions = [eigh(factor) for factor in self]
            values = reduce(_outer, [values for values, _ in decompositions])
            vectors = [vectors for _, vectors in decompositions]
            self._eigen = (state, KroneckerEigenbasis(vectors, values, self.order))
        return self._eigen[1]

    def solve(self, vectors: Tensor, damping: float = 0.0) -> Tensor:
        """``(F₁ ⊗ F₂ + damping · I)⁻¹`` times vectors: exact, by the eigendecomposition.

        Args:
            vectors: Shape ``[*θ]`` or ``[V, *θ]``.
            damping: Must be positive where a factor is singular.
        """
        return self.eigenbasis().solve(vectors, damping)

    def damped(self, damping: float) -> KroneckerFactors:
        """Factored damping: factors of a product close to ``F₁ ⊗ F₂ + damping · I``.

        ``(F₁ + √damping / π · I) ⊗ (F₂ + √damping · π · I)`` with ``π²`` the mean diagonal entry of
        ``F₂`` divided by that of ``F₁`` (Martens and Grosse, 2015, section 6.3). A single factor
        gets ``damping`` itself.

        Args:
            damping: Not negative.

        Raises:
            UsageError: There are more than two factors, or the damping is negative.
        """
        check_damping(damping)
        if len(self) == 1:
            return self.with_factors([_add(self[0], self[0].new_tensor(damping))])
        if len(self) != 2:
            raise UsageError(f"Factored damping is defined for two factors. Got {len(self)}.")
        first, second = (factor.diagonal(dim1=-2, dim2=-1).mean(-1) for factor in self)
        balance = torch.where((first > 0) & (second > 0), (second / first).sqrt(), 1.0)
        shift = sqrt(damping)
        return self.with_factors([_add(self[0], shift / balance), _add(self[1], shift * balance)])

    def inverse(self, damping: float = 0.0) -> KroneckerFactors:
        """Factors of the inverse, ``F₁⁻¹ ⊗ F₂⁻¹``, after factored damping.

        Args:
            damping: Must be positive where a factor is singular.

        Raises:
            UsageError: A factor is singular, or the damping is negative.
        """
        factors = []
        for factor in self.damped(damping):
            triangle, failed = torch.linalg.cholesky_ex(at_least_single(factor))
            if any_of(failed):
                raise UsageError(
                    f"A Kronecker factor is singular with a damping of {damping}: increase it."
                )
            factors.append(torch.cholesky_inverse(triangle).to(factor.dtype))
        return self.with_factors(factors)

    def trace(self) -> Tensor:
        """Trace of the product: no product is formed."""
        traces = [factor.diagonal(dim1=-2, dim2=-1).sum(-1) for factor in self]
        return reduce(torch.mul, traces).sum()

    def logdet(self, damping: float = 0.0) -> Tensor:
        """Logarithm of the determinant of the product plus ``damping`` times the identity."""
        return self.eigenbasis().logdet(damping)

    def diagonal(self) -> Tensor:
        """Diagonal of the product. Shape ``[*θ]``."""
        diagonals = [factor.diagonal(dim1=-2, dim2=-1) for factor in self]
        flat = reduce(_outer, diagonals).reshape(1, self.order.shape.numel())
        return self.order.vectors(flat, flat.new_empty(self.order.shape))

    def dense(self) -> Tensor:
        """The product itself, in the order of the flattened parameter. Shape ``[P, P]``."""
        if self.groups == 1:
            full = reduce(torch.kron, [f.reshape(f.shape[-2:]) for f in self])
        else:
            blocks = [reduce(torch.kron, [f[g] for f in self]) for g in range(self.groups)]
            full = torch.block_diag(*blocks)
        return self.order.matrix(full)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix, in its dtype.

    Computed in single precision at least: torch knows no decomposition in half precision.
    """
    values, vectors = torch.linalg.eigh(at_least_single(matrix))
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def multiply(factors: Sequence[Tensor], coordinates: Tensor) -> Tensor:
    """``(F₁ ⊗ F₂ ⊗ …) coordinates`` for each block. Shape ``[V, P] → [V, P]``."""
    groups = len(factors[0]) if factors[0].dim() == 3 else 1
    sizes = [factor.shape[-1] for factor in factors]
    product = coordinates.reshape(len(coordinates), groups, *sizes).transpose(0, 1)
    for axis, factor in enumerate(factors, start=2):
        last = product.movedim(axis, -1)
        flat = last.flatten(1, -2)
        with without_autocast():
            product = (flat @ factor.mT).reshape(last.shape).movedim(-1, axis)
    return product.transpose(0, 1).reshape(coordinates.shape)


def check_damping(damping: float) -> float:
    """The damping, if it is a number that is not negative.

    Raises:
        UsageError: It is negative.
    """
    if not damping >= 0:
        raise UsageError(f"The damping must not be negative. Got {damping}.")
    return damping


def _outer(first: Tensor, second: Tensor) -> Tensor:
    """``[..., D_1] , [..., D_2] → [..., D_1, D_2]``, group by group."""
    return first.unsqueeze(-1) * second.reshape(
        *second.shape[:-1], *[1] * (first.dim() - second.dim() + 1), second.shape[-1]
    )


def _add(factor: Tensor, shift: Tensor) -> Tensor:
    """``factor + shift · I``, one shift for each group."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return factor + shift[..., None, None] * eye
