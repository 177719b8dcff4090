"""The interface of all curvature matrices of one parameter, in any form of storage.

Vectors are tensors in the shape of the parameter, ``[*θ]``, or several of them, ``[V, *θ]``. So an
optimiser, or a Laplace approximation, is written once and takes Kronecker factors, corrected
eigenvalues and diagonals. Imports torch only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from backpack_core.contract.propagator import Reading
from backpack_core.errors import ShapeError, UsageError
from backpack_products.fingerprint import Fingerprint, as_tensor, from_tensor, of_parts
from backpack_products.values import at_least_single

if TYPE_CHECKING:
    from backpack_secondorder.eigenbasis import KroneckerEigenbasis

Number: TypeAlias = float | Tensor
Matrix = TypeVar("Matrix", bound="CurvatureMatrix")


@dataclass(frozen=True, eq=False)
class ParameterOrder:
    """How the entries of a parameter are numbered by the rows of a Kronecker product.

    Attributes:
        shape: Shape of the parameter, ``[*θ]``.
        positions: Where in the flattened parameter the row's entry lies, ``[P]``; ``None`` if
            rows follow the parameter's own order. (Transposed convolutions store ``[I, O]``.)
        name: The parameter and its module, for messages; empty if that is not known.
        rule: The rule that returned the product, for the fingerprint; ``None`` if the matrix was
            made by hand, or was loaded.
        saved: The fingerprint that was saved with the matrix.
    """

    shape: torch.Size
    positions: Tensor | None = None
    name: str = ""
    rule: type | None = None
    saved: Fingerprint = field(default_factory=dict)

    @classmethod
    def of(cls, reading: Reading, positions: Tensor | None = None) -> ParameterOrder:
        """The order of the parameter at which a product is read."""
        name = f"{reading.name!r} of {reading.path}"
        return cls(reading.shape, positions, name, reading.rule)

    @property
    def plugins(self) -> Fingerprint:
        """The plugins that computed the matrix; empty if they are not known."""
        if self.rule is None:
            return dict(self.saved)
        return of_parts([self.rule, ParameterOrder])  # of this package

    def __str__(self) -> str:
        """The parameter in words."""
        return f"the parameter {self.name}" if self.name else f"a parameter of {list(self.shape)}"

    def coordinates(self, vectors: Tensor) -> Tensor:
        """``[*θ]`` or ``[V, *θ]`` to ``[V, P]``, in the order of the rows.

        Raises:
            ShapeError: The vectors do not have the parameter's shape.
        """
        shape = vectors.shape if isinstance(vectors, Tensor) else None
        single = shape == self.shape
        if not single and (shape is None or shape[1:] != self.shape):
            raise ShapeError(
                f"Expected a vector of the parameter's shape {list(self.shape)}, or several as "
                f"[V, *shape]. Got {type(vectors).__name__ if shape is None else list(shape)}."
            )
        flat = vectors.reshape(1 if single else len(vectors), self.shape.numel())
        return flat if self.positions is None else flat[:, self.positions]

    def vectors(self, coordinates: Tensor, like: Tensor) -> Tensor:
        """Reverse :meth:`coordinates`: ``[V, P]`` to the shape of ``like``."""
        if self.positions is not None:
            coordinates = torch.empty_like(coordinates).index_copy(1, self.positions, coordinates)
        return coordinates.reshape(like.shape)

    def matrix(self, mat: Tensor) -> Tensor:
        """Put the rows and columns of ``[P, P]`` into the parameter's order."""
        if self.positions is None:
            return mat
        inverse = self.positions.argsort()
        return mat[inverse][:, inverse]

    def on(self, device: torch.device) -> ParameterOrder:
        """The order on a device."""
        if self.positions is None or self.positions.device == device:
            return self
        return replace(self, positions=self.positions.to(device))

    def equals(self, other: ParameterOrder) -> bool:
        """Whether both number the entries of a parameter in the same way."""
        if self.shape != other.shape or (self.positions is None) != (other.positions is None):
            return False
        if self.positions is None or other.positions is None or self.positions is other.positions:
            return True
        return torch.equal(self.positions, other.positions)

    def state(self) -> dict[str, Tensor]:
        """The order as tensors, for a file."""
        state = {"shape": torch.tensor(self.shape, dtype=torch.int64), **self.tensors()}
        plugins = self.plugins
        return {**state, "plugins": as_tensor(plugins)} if plugins else state

    def tensors(self) -> dict[str, Tensor]:
        """What is a tensor, by name."""
        return {} if self.positions is None else {"positions": self.positions}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> ParameterOrder:
        """The order from its :meth:`state`."""
        saved = from_tensor(state["plugins"]) if "plugins" in state else {}
        return cls(torch.Size(state["shape"].tolist()), state.get("positions"), saved=saved)


class CurvatureMatrix(ABC):
    """A symmetric matrix ``F`` over the ``P`` entries of one parameter.

    ``scalar * F``, ``F / scalar`` and ``F @ vectors`` have their usual meaning. ``F + G`` is the
    matrix for the data of both. For a diagonal, a block, or corrected eigenvalues in one basis,
    that is the sum of the matrices; for several Kronecker factors see
    :class:`~backpack_secondorder.kronecker.KroneckerFactors`.

    Attributes:
        order: How the parameter's entries are numbered.
    """

    order: ParameterOrder

    # So ``numpy_scalar * F`` calls __rmul__; otherwise numpy would make an array of objects.
    __array_ufunc__ = None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that, with the order, determine the matrix, by name."""

    @abstractmethod
    def with_tensors(self: Matrix, tensors: Mapping[str, Tensor]) -> Matrix:
        """A matrix of the same form with other values of :meth:`tensors`."""

    @abstractmethod
    def matmul(self, vectors: Tensor) -> Tensor:
        """``F`` times vectors. Shape ``[*θ]`` or ``[V, *θ]``, like the result."""

    @abstractmethod
    def eigenbasis(self) -> KroneckerEigenbasis:
        """The eigendecomposition."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal. Shape ``[*θ]``."""

    @abstractmethod
    def trace(self) -> Tensor:
        """The trace, a number; no matrix is formed."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix in the order of the flattened parameter, ``[P, P]``: for small layers."""

    @abstractmethod
    def damped(self: Matrix, damping: Number) -> Matrix:
        """A matrix of the same form for ``F + damping · I``."""

    @abstractmethod
    def inverse(self: Matrix, damping: Number = 0.0) -> Matrix:
        """The inverse of :meth:`damped`, in the same form.

        Raises:
            UsageError: The damped matrix is singular, or the damping is negative.
        """

    @abstractmethod
    def scaled(self: Matrix, scalar: Number) -> Matrix:
        """``scalar · F``.

        Raises:
            UsageError: The scalar is not a number, or is negative.
        """

    @abstractmethod
    def plus(self: Matrix, other: Matrix) -> Matrix:
        """``F + G``; see the class.

        Raises:
            UsageError: The sum cannot be stored in this form.
            ShapeError: The matrices have different sizes.
        """

    @property
    def shape(self) -> torch.Size:
        """``[P, P]``."""
        size = self.order.shape.numel()
        return torch.Size([size, size])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored tensors."""
        return next(iter(self.tensors().values())).dtype

    @property
    def device(self) -> torch.device:
        """The device of the stored tensors."""
        return next(iter(self.tensors().values())).device

    def solve(self, vectors: Tensor, damping: Number = 0.0) -> Tensor:
        """``(F + damping · I)⁻¹`` times vectors: exact, by the eigendecomposition.

        In single precision, three digits are right if the damping is above 10⁻⁵ of the largest
        eigenvalue; inputs far from zero make that large.

        Args:
            vectors: Shape ``[*θ]`` or ``[V, *θ]``.
            damping: Must be positive if the matrix is singular.

        Raises:
            UsageError: The damped matrix is singular, the damping is negative, or a factor is not
                finite.
        """
        return self.eigenbasis().inverse(damping).matmul(vectors)

    def logdet(self, damping: Number = 0.0) -> Tensor:
        """``log det(F + damping · I)``; ``-inf`` if the damped matrix is singular.

        Raises:
            UsageError: The damping is negative, or a factor is not finite.
        """
        return at_least_single(self.eigenbasis().damped(damping).values).log().sum()

    def sample(
        self,
        count: int | None = None,
        damping: Number = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws from the Gaussian with the precision matrix ``F + damping · I``.

        ``𝒩(0, (F + damping · I)⁻¹)``: for a Laplace approximation with the curvature ``F`` of a
        summed loss and a prior of precision ``damping``, the posterior about the parameter. For the
        Gaussian with covariance ``F``, draw from ``F.eigenbasis().inverse()``.

        Args:
            count: How many draws; ``None`` for one, without axis ``V``.
            damping: Must be positive if the matrix is singular.
            generator: The source of random numbers; default: torch's.

        Returns:
            Shape ``[*θ]``, or ``[count, *θ]``.

        Raises:
            UsageError: The damped matrix is singular or not positive, the damping is negative, or a
                factor is not finite.
        """
        return self.eigenbasis().inverse(damping).root_times_noise(count, generator)

    def moving_average(self: Matrix, other: Matrix, decay: float) -> Matrix:
        """``decay · F + (1 - decay) · G``, with ``F`` the average so far.

        Args:
            other: ``G``, of the latest data.
            decay: Between 0 and 1.

        Raises:
            UsageError: ``decay`` is not between 0 and 1.
        """
        if not 0 <= decay <= 1:
            raise UsageError(f"The decay of a moving average must be from 0 to 1. Got {decay}.")
        return self.scaled(decay).plus(other.scaled(1 - decay))

    def map(self: Matrix, function: Any) -> Matrix:
        """Apply a function to each tensor and return a matrix of the same form."""
        return self.with_tensors({name: function(t) for name, t in self.tensors().items()})

    def to(self: Matrix, *args: Any, **kwargs: Any) -> Matrix:
        """The matrix on another device or in another dtype; arguments as for ``Tensor.to``."""
        tensors = self.tensors()
        moved = {name: tensor.to(*args, **kwargs) for name, tensor in tensors.items()}
        return self if all(moved[n] is tensors[n] for n in moved) else self.with_tensors(moved)

    def clone(self: Matrix) -> Matrix:
        """A copy in new memory."""
        return self.map(torch.clone)

    def detach(self: Matrix) -> Matrix:
        """The matrix without a graph."""
        return self.map(torch.Tensor.detach)

    def all_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; with the parameter's shape they are the matrix."""
        return {**self.tensors(), **self.order.tensors()}

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name, for a file; :func:`matrix_from_state` reverses it."""
        return {**self.all_tensors(), **self.order.state()}

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """See :meth:`matmul`."""
        return self.matmul(vectors)

    def __mul__(self: Matrix, scalar: Number) -> Matrix:
        """See :meth:`scaled`."""
        return self.scaled(scalar)

    def __rmul__(self: Matrix, scalar: Number) -> Matrix:
        """See :meth:`scaled`."""
        return self.scaled(scalar)

    def __imul__(self: Matrix, scalar: Number) -> Matrix:
        """Not in place: what others hold does not change."""
        return self.scaled(scalar)

    def __truediv__(self: Matrix, scalar: Number) -> Matrix:
        """See :meth:`scaled`."""
        return self.scaled(1 / scalar)

    def __add__(self: Matrix, other: Matrix) -> Matrix:
        """See :meth:`plus`."""
        return self.plus(other)

    def __iadd__(self: Matrix, other: Matrix) -> Matrix:
        """Not in place: what others hold does not change."""
        return self.plus(other)

    def __radd__(self: Matrix, other: Any) -> Matrix:
        """Make :func:`sum` work: it starts from the number zero."""
        if isinstance(other, int) and other == 0:
            return self
        raise UsageError(
            f"{type(self).__name__} is a matrix and can only be added to another one. Got "
            f"{type(other).__name__}: for a list of factors, use list(factors)."
        )
