"""Kronecker-factored curvature as a matrix: sums, products, solves, eigenvalues.

``param.kfac`` is an example: a list of factors, with arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from backpack_core.errors import ShapeError, UsageError
from backpack_products.values import any_of, at_least_single
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.linalg import eigh, multiply
from backpack_secondorder.matrix import CurvatureMatrix, Number, ParameterOrder
from backpack_secondorder.matrix_arguments import (
    check_damping,
    check_finite,
    check_same,
    check_scalar,
)


class KroneckerFactors(CurvatureMatrix, list[Tensor]):  # type: ignore[misc]
    """The factors of a Kronecker product ``F₁ ⊗ F₂ ⊗ …``, which approximates a curvature block.

    A list: ``param.kfac[0]``, ``len(param.kfac)`` and loops work as on a list of the factors.
    A single factor is the block itself. A diagonal factor may be stored as a vector. The product
    has the order of the flattened parameter, with input and output axes of a transposed
    convolution exchanged. The methods below take and return vectors in the shape of the parameter,
    ``[*θ]`` or ``[V, *θ]``, for any order.

    For a layer with ``G > 1`` groups, every factor of the weight has a first axis, ``[G, D, D]``:
    one product for each group, and zeros between groups.

    Every sample has a weight ``s`` (``1/N`` for a mean). The first factor is a sum,
    ``F₁ = Σ_n s g gᵀ``; the others are averages, ``F₂ = Σ_n s a aᵀ / Σ_n s``. Arithmetic acts on
    the weights. ``scalar * F`` multiplies ``s``, that is ``F₁``. ``F + G`` has the samples of both,
    each with its weight: ``F₁ + G₁``, and averages ``(w F₂ + v G₂) / (w + v)`` by the ``weight`` of
    each. So the joined batch gives ``F + G`` if the loss is a sum, and ``n/N * F + m/N * G`` if it
    is a mean. :meth:`moving_average` does not use the weights. In general, the sum of the two
    matrices is not a Kronecker product.

    Attributes:
        order: How the parameter's entries are numbered.
        weight: ``Σ_n s``, the weight of the averages in sums; one for a mean over the batch.
        parts: Factors of uses in several orders that these were made of; arithmetic drops them.
        instead: The block or the diagonal of the same columns, if they reached only some uses of
            the parameter; other columns may reach all uses, which may have no common factors.
    """

    def __init__(
        self,
        factors: Iterable[Tensor],
        order: ParameterOrder,
        weight: Number = 1.0,
        parts: Sequence[KroneckerFactors] = (),
    ) -> None:
        """Store the factors.

        Args:
            factors: Symmetric matrices ``[D_k, D_k]`` or ``[G, D_k, D_k]``, or the diagonals of
                diagonal ones, ``[D_k]`` or ``[G, D_k]``.
            order: How the parameter's entries are numbered.
            weight: See the class.
            parts: See the class.

        Raises:
            ShapeError: The product of the sizes is not that of the parameter, or a factor is not
                square.
        """
        super().__init__(factors)
        self.order = order
        self.weight = weight
        self.parts = parts
        self.instead: KroneckerFactors | None = None
        self._eigen: tuple[list[Tensor], object, KroneckerEigenbasis] | None = None
        size = groups = self.groups
        for factor in self:
            shape = factor.shape[1:] if groups > 1 else factor.shape
            if len(shape) != 1 and shape[-1] != shape[-2]:
                shapes = [list(factor.shape) for factor in self]
                raise ShapeError(f"Kronecker factors must be square or vectors. Got {shapes}.")
            size *= shape[-1]
        if size != order.shape.numel():
            shapes = [list(factor.shape) for factor in self]
            raise ShapeError(
                f"Kronecker factors of sizes {shapes} make a matrix of size {size}, but the "
                f"parameter of shape {list(order.shape)} has {order.shape.numel()} entries."
            )

    def __repr__(self) -> str:
        """Sizes of the factors, and what they stand for."""
        sizes = " ⊗ ".join(str(list(factor.shape)) for factor in self)
        return f"<Kronecker factors {sizes} of a parameter of shape {list(self.order.shape)}>"

    @property
    def groups(self) -> int:
        """Number of blocks ``G``."""
        for factor in self:
            if factor.dim() == 3:
                return factor.shape[0]
        return 1

    @property
    def sizes(self) -> list[int]:
        """The number of groups, and the size of every factor."""
        return [self.groups, *(factor.shape[-1] for factor in self)]

    @property
    def structure(self) -> Literal["kronecker", "block", "diagonal"]:
        """What is stored: a product of factors, the block itself, or its diagonal."""
        if len(self) > 1:
            return "kronecker"
        return "diagonal" if self.is_diagonal(self[0]) else "block"

    def is_diagonal(self, factor: Tensor) -> bool:
        """Whether a factor is diagonal, and stored as a vector."""
        return factor.dim() - (self.groups > 1) == 1

    def tensors(self) -> dict[str, Tensor]:
        """The factors."""
        return {f"factors.{k}": factor for k, factor in enumerate(self)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KroneckerFactors:
        """Other factors."""
        return self.with_factors(tensors[f"factors.{k}"] for k in range(len(self)))

    def with_factors(self, factors: Iterable[Tensor]) -> KroneckerFactors:
        """Other factors for the same parameter, of the same weight."""
        stored = [*factors]
        device = stored[0].device
        weight = self.weight.to(device) if isinstance(self.weight, Tensor) else self.weight
        return KroneckerFactors(stored, self.order.on(device), weight)

    def with_weight(self, weight: Number) -> KroneckerFactors:
        """The same factors; in sums, the averages have this weight."""
        return KroneckerFactors(self, self.order, weight)

    def all_tensors(self) -> dict[str, Tensor]:
        """Factors, weight and order."""
        dtype = at_least_single(self[0].new_empty(0)).dtype
        weight = torch.as_tensor(self.weight, dtype=dtype, device=self.device)
        return {**super().all_tensors(), "weight": weight.detach()}

    def matmul(self, vectors: Tensor) -> Tensor:
        """Multiply with the Kronecker product, without forming it."""
        coordinates = self.order.coordinates(vectors)
        return self.order.vectors(multiply(self, self.sizes, coordinates), vectors)

    def eigenbasis(self) -> KroneckerEigenbasis:
        """The eigendecomposition; computed once, and again after a factor was changed or replaced.

        Raises:
            UsageError: A factor is not finite.
        """
        return self.decomposed(is_measured=True)

    def decomposed(self, is_measured: bool) -> KroneckerEigenbasis:
        """The same as :meth:`eigenbasis`, but factors are checked only in measured passes."""
        if self._eigen is not None:
            factors, state, basis = self._eigen
            if len(self) == len(factors) and all(map(is_, self, factors)) and self._state == state:
                return basis
        if is_measured:
            self._check_finite()
        pairs = [(f.clone(), None) if self.is_diagonal(f) else eigh(f, is_measured) for f in self]
        values = reduce(_outer, [values for values, _ in pairs])
        basis = KroneckerEigenbasis([vectors for _, vectors in pairs], values, self.order)
        if not any(factor.is_inference() for factor in self):  # their versions do not change
            # The factors are stored, so that no other tensor can get the address of one.
            self._eigen = [*self], self._state, basis
        return basis

    @property
    def _state(self) -> object:
        """A key that changes when factors are changed or replaced."""
        versions = [0 if factor.is_inference() else factor._version for factor in self]
        return versions, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def _check_finite(self) -> None:
        for place, factor in enumerate(self):
            check_finite(self._named(place), factor, self.order)

    def _named(self, place: int) -> str:
        """The name of a factor, for messages."""
        return f"Kronecker factor {place}" if len(self) > 1 else self.structure

    def scaled(self, scalar: Number) -> KroneckerFactors:
        """``scalar · F₁ ⊗ F₂ ⊗ …``: the first factor is multiplied, and the weight in sums."""
        number = check_scalar(scalar)
        return KroneckerFactors([self[0] * number, *self[1:]], self.order, self.weight * number)

    def plus(self, other: KroneckerFactors) -> KroneckerFactors:
        """The factors of all samples: the sum of the first ones, averages of the others.

        Raises:
            UsageError: The other matrix has another form.
            ShapeError: The factors have different sizes.
        """
        check_same(self, other)
        if self.sizes != other.sizes:
            raise ShapeError(
                f"Kronecker factors are added one by one, so their sizes must agree. Got "
                f"{self.sizes[1:]} and {other.sizes[1:]}."
            )
        first, second = [], []
        for a, b in zip(self, other, strict=True):
            is_mixed = self.is_diagonal(a) != other.is_diagonal(b)
            first.append(self._full(a) if is_mixed else a)
            second.append(other._full(b) if is_mixed else b)
        weight = self.weight + other.weight
        share = _share(self.weight, weight)
        averages = [share * a + (1 - share) * b for a, b in zip(first[1:], second[1:], strict=True)]
        return KroneckerFactors([first[0] + second[0], *averages], self.order, weight)

    def moving_average(self, other: KroneckerFactors, decay: float) -> KroneckerFactors:
        """``decay · F_i + (1 - decay) · G_i`` for each factor, with ``F`` the average so far.

        The factors count equally, however many targets of a batch count: a batch with few of them,
        or a larger one of a sum, has the share that ``decay`` says. A batch without any changes the
        first factor only. Martens and Grosse, 2015, arXiv:1503.05671, section 5.

        Args:
            other: ``G``, of the latest data.
            decay: Between 0 and 1.

        Raises:
            UsageError: ``decay`` is not between 0 and 1, or the matrices have no sum.
        """
        check_same(self, other)
        weight = decay * self.weight + (1 - decay) * other.weight
        parts = [each.with_weight(_as_one(each.weight)) for each in (self, other)]
        found: KroneckerFactors = CurvatureMatrix.moving_average(parts[0], parts[1], decay)
        return found.with_weight(weight)

    def damped(
        self, damping: Number, balanced: bool = True, per_factor: bool = False
    ) -> KroneckerFactors:
        """Factored damping: factors of a product close to ``F₁ ⊗ F₂ + damping · I``.

        ``(F₁ + γ / π · I) ⊗ (F₂ + γ π · I)`` with ``γ = √damping``, and ``π²`` the mean diagonal
        entry of ``F₂`` divided by that of ``F₁`` (Martens and Grosse, 2015, section 6.3, where the
        factors come in the other order). A single factor gets ``damping`` itself, which is exact.

        Args:
            damping: Not negative.
            balanced: Whether to use ``π``; otherwise it is one, and both factors get the same.
            per_factor: Whether ``damping`` is meant for the factors: ``γ = damping``.

        Raises:
            UsageError: The product has more than two factors, or the damping is negative.
        """
        damping = check_damping(damping)
        if len(self) == 1:
            return self.with_factors([self._shifted(self[0], damping)])
        if len(self) != 2:
            raise UsageError(
                f"Factored damping is defined for two factors, but this product has {len(self)}: "
                "take eigenbasis().damped(...), which is exact."
            )
        shift = damping if per_factor else damping**0.5
        balance: Number = 1.0
        if balanced:
            first, second = (at_least_single(self._diagonal(f)).mean(-1) for f in self)
            balance = torch.where((first > 0) & (second > 0), (second / first).sqrt(), 1.0)
        shifts = (shift / balance, shift * balance)
        return self.with_factors(self._shifted(f, s) for f, s in zip(self, shifts, strict=True))

    def inverse(
        self, damping: Number = 0.0, balanced: bool = True, per_factor: bool = False
    ) -> KroneckerFactors:
        """Factors of the inverse, ``F₁⁻¹ ⊗ F₂⁻¹``, after factored damping.

        For the inverse of ``F₁ ⊗ F₂ + damping · I`` itself, take ``eigenbasis().inverse(damping)``.

        Args:
            damping: Must be positive if a factor is singular.
            balanced: As for :meth:`damped`.
            per_factor: As for :meth:`damped`.

        Raises:
            UsageError: A factor is singular, or not finite, or the damping is negative.
        """
        self._check_finite()
        is_damped = any_of(torch.as_tensor(check_damping(damping)) != 0)
        damped = self.damped(damping, balanced, per_factor) if is_damped else self
        factors = []
        for place, (factor, before) in enumerate(zip(damped, self, strict=True)):
            inverse = self._inverse(factor, before)
            if inverse is None:
                raise UsageError(
                    f"The {self._named(place)} of {self.order} is singular with "
                    f"damping={damping}: increase damping."
                )
            factors.append(inverse)
        return self.with_factors(factors)

    def _inverse(self, factor: Tensor, undamped: Tensor) -> Tensor | None:
        """The inverse of a factor; ``None`` if it is singular."""
        if self.is_diagonal(factor):
            return None if any_of(factor <= 0) else factor.reciprocal()
        is_shifted = any_of(self._diagonal(factor) != self._diagonal(undamped))
        if not is_shifted and any_of(eigh(factor)[0] <= 0):
            return None  # a decomposition would invert rounding errors
        triangle, failed = torch.linalg.cholesky_ex(at_least_single(factor))
        return None if any_of(failed) else torch.cholesky_inverse(triangle).to(factor.dtype)

    def trace(self) -> Tensor:
        """Trace of the product, from those of the factors."""
        traces = [at_least_single(self._diagonal(factor)).sum(-1) for factor in self]
        return reduce(torch.mul, traces).sum().to(self.dtype)

    def diagonal(self) -> Tensor:
        """Diagonal of the product. Shape ``[*θ]``."""
        diagonals = [self._diagonal(factor) for factor in self]
        flat = reduce(_outer, diagonals).reshape(1, self.order.shape.numel())
        return self.order.vectors(flat, flat.new_empty(self.order.shape))

    def dense(self) -> Tensor:
        """The product itself, in the order of the flattened parameter. Shape ``[P, P]``."""
        factors = [self._full(factor).contiguous() for factor in self]
        if self.groups == 1:
            full = reduce(torch.kron, [f.reshape(f.shape[-2:]) for f in factors])
        else:
            blocks = [reduce(torch.kron, [f[g] for f in factors]) for g in range(self.groups)]
            full = torch.block_diag(*blocks)
        return self.order.matrix(full)

    def _diagonal(self, factor: Tensor) -> Tensor:
        return factor if self.is_diagonal(factor) else factor.diagonal(dim1=-2, dim2=-1)

    def _full(self, factor: Tensor) -> Tensor:
        return torch.diag_embed(factor) if self.is_diagonal(factor) else factor

    def _shifted(self, factor: Tensor, shift: Number) -> Tensor:
        """``factor + shift · I``, one shift for each group."""
        shift = torch.as_tensor(shift, device=factor.device).to(factor.dtype).unsqueeze(-1)
        if self.is_diagonal(factor):
            return factor + shift
        return factor + torch.diag_embed(shift.expand(*shift.shape[:-1], factor.shape[-1]))


def diagonal_matrix(values: Tensor) -> KroneckerFactors:
    """A diagonal ``[*θ]`` as the only Kronecker factor, stored as a vector."""
    return KroneckerFactors([values.reshape(-1)], ParameterOrder(values.shape))


def as_matrix(value: Any) -> CurvatureMatrix:
    """The value that an extension stored on a parameter, as a matrix; a tensor is a diagonal.

    Args:
        value: ``param.kfac``, ``param.ekfac``, ``param.diag_ggn_exact`` and their like.

    Raises:
        UsageError: The value is not a tensor or a matrix.
    """
    if isinstance(value, CurvatureMatrix):
        return value
    if isinstance(value, Tensor):
        return diagonal_matrix(value)
    raise UsageError(
        "A curvature matrix must be what KFAC, KFLR, KFRA or EKFAC stores, or a tensor in the "
        f"parameter's shape for a diagonal. Got {type(value).__name__}."
    )


def matrix_from_state(state: Mapping[str, Tensor]) -> KroneckerFactors | KroneckerEigenbasis:
    """The matrix from its ``state_dict()``.

    Raises:
        UsageError: The state is not that of a matrix.
    """
    if "shape" not in state or not {"factors.0", "values"} & set(state):
        raise UsageError(f"This is not the state of a curvature matrix. Got {sorted(state)}.")
    return matrix_of(state, ParameterOrder.from_state(state))


def matrix_of(
    state: Mapping[str, Tensor], order: ParameterOrder
) -> KroneckerFactors | KroneckerEigenbasis:
    """The matrix from its ``all_tensors()`` and an order."""
    if "values" in state:
        has_groups = any(n.startswith("vectors.") and q.dim() == 3 for n, q in state.items())
        count = state["values"].dim() - has_groups
        vectors = [state.get(f"vectors.{k}") for k in range(count)]
        return KroneckerEigenbasis(vectors, state["values"], order)
    factors = [state[n] for n in sorted(state, key=_number) if n.startswith("factors.")]
    return KroneckerFactors(factors, order, state["weight"])


def _number(name: str) -> int:
    return int(name.split(".")[1]) if "." in name else -1


def _as_one(weight: Number) -> Number:
    """One; zero for zero."""
    return (weight > 0).to(weight.dtype) if isinstance(weight, Tensor) else float(weight > 0)


def _share(weight: Number, total: Number) -> Number:
    """``weight / total``; one half if both are zero."""
    if isinstance(total, Tensor):
        return torch.where(total > 0, weight / total, 0.5)
    return weight / total if total else 0.5


def _outer(first: Tensor, second: Tensor) -> Tensor:
    """``[..., D_1] , [..., D_2] → [..., D_1, D_2]``, group by group."""
    return first.unsqueeze(-1) * second.reshape(
        *second.shape[:-1], *[1] * (first.dim() - second.dim() + 1), second.shape[-1]
    )
