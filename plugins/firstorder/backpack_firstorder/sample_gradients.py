"""Individual gradients of one parameter, kept as a sum of products."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from backpack_core.autocast import without_autocast
from backpack_core.errors import ShapeError, UsageError
from backpack_firstorder.divisors import Divisor, divided
from backpack_firstorder.low_rank import nearest_factors
from backpack_firstorder.pairs import Pairing, as_pairing, pairs
from backpack_firstorder.plain import plain_terms
from backpack_firstorder.products import norm
from backpack_firstorder.single import in_single
from backpack_firstorder.terms import (
    FORMS,
    Index,
    chosen_by,
    fresh,
    kept,
    mapped,
    matrix_shape,
    numbered,
    side_by_side,
    state_of,
    tensors_of,
    terms_from,
    times,
)
from backpack_products.affine import AffineProduct
from backpack_products.operations import batch_sum, dense, weighted_sum
from backpack_products.product import DenseProduct, SampleProduct, SumProduct
from backpack_products.values import is_flag

if TYPE_CHECKING:
    from backpack_firstorder.projections import Projection

P = ParamSpec("P")
T = TypeVar("T")


def exactly(function: Callable[P, T]) -> Callable[P, T]:
    """A function without a graph, in the precision of its operands, also where autocast is on."""

    @wraps(function)
    def computed(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad(), without_autocast():
            return function(*args, **kwargs)

    return computed


class SampleGradients:
    """Individual gradients ``[N, *θ]`` of one parameter, kept in the form that takes less memory.

    ``BatchGrad(form="product")`` leaves them, with the scale of its field: ``∇_θ ℓ_n`` for a sum,
    ``1/N ∇_θ ℓ_n`` for a mean. They are a sum of terms. A term is formed, ``[N, *θ]``, or has
    factors: output gradients ``[N, S, G, O]`` and inputs ``[N, S, G, I]`` of a weight (of a
    convolution after unfolding), or rows of a table and the gradients that arrived there. A
    parameter with several uses has several terms, and every method is exact for their sum.

    They hold no graph and no model, and are not differentiable. Each method takes the way with
    fewer multiply-adds, and forms as many gradients at a time as fit into ``memory_budget()``.

    Example:
        >>> with backpack(BatchGrad(form="product")):
        ...     loss.backward()
        >>> queries = {name: p.grad_batch for name, p in model.named_parameters()}
        >>> queries["0.weight"].inner(queries["0.weight"])  # [N, N]

    Attributes:
        shape: ``[N, *θ]``.
        dtype: The dtype of the terms.
        device: Where they lie.
    """

    __slots__ = ("_terms", "device", "dtype", "shape")

    def __init__(self, terms: Iterable[SampleProduct]) -> None:
        """Store terms; use :meth:`of`, :meth:`from_dense` or :meth:`from_factors`."""
        self._terms = tuple(terms)
        first = self._terms[0]
        self.shape = torch.Size((first.samples, *first.shape))
        self.dtype, self.device = first.like.dtype, first.like.device

    # Made ----------------------------------------------------------------------------------------

    @classmethod
    def of(cls, product: SampleProduct) -> SampleGradients:
        """The gradients that a product stands for, in their own memory.

        Args:
            product: A product of one column, ``[1, N, *θ]``.
        """
        with torch.no_grad():
            return cls(kept(plain_terms(product)))

    @classmethod
    def from_dense(cls, gradients: Tensor) -> SampleGradients:
        """From formed gradients ``[N, *θ]``; they are not copied."""
        if not gradients.dim():
            raise ShapeError("from_dense takes gradients [N, *θ]. Got a tensor without axes.")
        return cls([DenseProduct(gradients.detach().unsqueeze(0))])

    @classmethod
    def from_factors(cls, out: Tensor, inp: Tensor, shape: Sequence[int] = ()) -> SampleGradients:
        """From factors of ``Σ_s out[n, s] ⊗ inp[n, s]``; they are not copied.

        Args:
            out: Shape ``[N, S, O]``, or ``[N, S, G, O]`` for groups.
            inp: Shape ``[N, S, I]``, or ``[N, S, G, I]``.
            shape: Shape of the parameter; default: ``[O, I]``, or ``[G · O, I]``.
        """
        left, right = (f.unsqueeze(2) if f.dim() == 3 else f for f in (out, inp))
        if left.dim() != 4 or right.dim() != 4:
            what = f"{[*out.shape]} and {[*inp.shape]}"
            raise ShapeError(f"from_factors takes [N, S, O] and [N, S, I]. Got {what}.")
        theta = torch.Size(shape or (left.shape[2] * left.shape[3], right.shape[3]))
        return cls([AffineProduct(left.detach().unsqueeze(0), right.detach(), theta)])

    @classmethod
    def cat(cls, parts: Sequence[SampleGradients]) -> SampleGradients:
        """Several sets, one after the other; factors with fewer positions are filled with zeros.

        Raises:
            UsageError: ``parts`` is empty, or belongs to parameters of different shapes.
        """
        if not parts or len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str([*part.shape]) for part in parts) or "none"
            raise UsageError(f"cat takes gradients of one parameter. Got shapes {shapes}.")
        if len(parts) == 1:
            return parts[0]
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        parts = [part.to(dtype=dtype, device=parts[0].device) for part in parts]
        forms: dict[Any, list[SampleProduct | None]] = {}
        for place, part in enumerate(parts):
            for key, term in numbered(part._terms):
                forms.setdefault(key, [None] * len(parts))[place] = term
        counts = [len(part) for part in parts]
        return cls(side_by_side(terms, counts) for terms in forms.values())

    # As a sequence -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """``N``."""
        return self.shape[0]

    def __getitem__(self, index: Index) -> SampleGradients:
        """Some samples; a single number gives a set of one."""
        chosen = chosen_by(index, len(self), self.device)
        return self._map(lambda factor: factor[chosen])

    def _map(self, function: Callable[[Tensor], Tensor], number: Any = None) -> SampleGradients:
        """The same terms with other factors, samples on axis 0; numbers of rows by ``number``."""
        return SampleGradients(mapped(term, function, number or function) for term in self._terms)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SampleGradients:
        """On another device, or in another dtype; itself if nothing changes."""
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"Gradients need a floating-point dtype. Got {dtype}.")
        device = self.device if device is None else torch.device(device)
        dtype = self.dtype if dtype is None else dtype
        if (device, dtype) == (self.device, self.dtype):
            return self
        return self._map(lambda f: f.to(device, dtype), lambda rows: rows.to(device))

    def clone(self) -> SampleGradients:
        """A copy in its own memory."""
        return self._map(lambda factor: factor.clone(memory_format=torch.contiguous_format))

    @property
    def nbytes(self) -> int:
        """How many bytes the terms take."""
        return sum(tensor.nbytes for term in self._terms for _, tensor in tensors_of(term))

    @property
    def terms(self) -> tuple[SampleProduct, ...]:
        """The terms, of one column each; not to be changed."""
        return self._terms

    def __repr__(self) -> str:
        """Shape, dtype and forms."""
        forms = " + ".join(FORMS[type(term)] for term in self._terms)
        return f"<SampleGradients {[*self.shape]} {self.dtype}, {forms}, {self.nbytes:,} bytes>"

    # Read ----------------------------------------------------------------------------------------

    def product(self) -> SampleProduct:
        """The terms as one product, ``[1, N, *θ]``, which holds what operations store on it."""
        parts = [fresh(term) for term in self._terms]
        return parts[0] if len(parts) == 1 else SumProduct(parts)

    @exactly
    def dense(self) -> Tensor:
        """The gradients, formed. Shape ``[N, *θ]``."""
        return dense(self.product()).squeeze(0).clone()

    @exactly
    def norm(self) -> Tensor:
        """Euclidean norms, at least in single precision. Shape ``[N]``."""
        single = in_single(self.product())
        return norm(single).value().squeeze(0).to(single.like.dtype)

    @exactly
    def inner(self, other: SampleGradients | Tensor, form: Pairing | None = None) -> Tensor:
        """Inner products with other gradients of the parameter, at least in single precision.

        Args:
            other: Gradients of ``M`` samples, of this or of another pass; or directions
                ``[M, *θ]``, such as preconditioned queries; or one direction ``[*θ]``.
            form: For factors: ``"positions"`` pairs positions, ``"formed"`` forms gradients of some
                features at a time; default: what takes fewer multiply-adds.

        Returns:
            Shape ``[N, M]``, ``M = 1`` for one direction.

        Raises:
            ShapeError: The others belong to a parameter of another shape.
            UsageError: The form is unknown.
        """
        met = as_gradients(other, self.shape[1:])
        dtype = torch.promote_types(torch.promote_types(self.dtype, met.dtype), torch.float32)
        met = met.to(self.device, dtype)
        return pairs(self.to(dtype=dtype).product(), met.product(), as_pairing(form))

    @exactly
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``Σ_n weights[n] g_n``, at the cost of a plain weight gradient.

        Args:
            weights: Shape ``[N]``; or ``[K, N]`` for several sums.

        Returns:
            Shape ``[*θ]``, or ``[K, *θ]``.
        """
        weights = torch.as_tensor(weights)
        if weights.dim() not in (1, 2) or weights.shape[-1] != len(self):
            what = f"[N] or [K, N] with N = {len(self)}"
            raise ShapeError(f"weighted_sum takes weights {what}. Got {[*weights.shape]}.")
        some = weights.detach().to(self.device, self.dtype).unsqueeze(-2)
        sums = weighted_sum(self.product(), some if some.dim() == 3 else some.unsqueeze(0))
        return sums if weights.dim() == 2 else sums.squeeze(0).clone()

    @exactly
    def sum(self) -> Tensor:
        """``Σ_n g_n``, the gradient. Shape ``[*θ]``."""
        return batch_sum(self.product()).squeeze(0).clone()

    @exactly
    def project(self, projection: Projection, name: str) -> Tensor:
        """Random projections that keep inner products in expectation.

        Args:
            projection: The projection.
            name: The parameter's name; the random numbers depend on it.

        Returns:
            Shape ``[N, dim]``.
        """
        return projection(self.product(), name)

    # Changed -------------------------------------------------------------------------------------

    @exactly
    def times(self, weights: Tensor) -> SampleGradients:
        """Each gradient multiplied by a number: ``weights[n] g_n``, in the same form.

        Args:
            weights: Shape ``[N]``.

        Raises:
            ShapeError: There is not one weight for each sample.
        """
        if weights.shape != (len(self),):
            raise ShapeError(f"times takes weights [{len(self)}]. Got {[*weights.shape]}.")
        return SampleGradients(times(term, weights) for term in self._terms)

    @exactly
    def divide(self, divisor: Divisor) -> SampleGradients:
        """Each gradient divided, entry by entry, at least in single precision.

        Args:
            divisor: Shape ``[*θ]``, as for Adam: gradients of a weight are then formed. Or rows
                ``[R]`` and columns ``[C]`` of ``rows ⊗ columns``, as for Adafactor: gradients stay
                products. The parameter's first axis has the rows, all others the columns. See
                :func:`~backpack_firstorder.divisors_of`.

        Raises:
            ShapeError: The divisor does not fit the parameter.
        """
        return SampleGradients.of(divided(self.product(), divisor))

    @exactly
    def low_rank(self, rank: int) -> SampleGradients:
        """The best approximation of each gradient by a matrix of some rank, kept as factors.

        The matrix has the parameter's first axis as rows, and all others as columns. Inner products
        with others then take ``rank`` positions instead of all (Li et al., 2026, LoRIF).

        Args:
            rank: How many columns ``c`` the factors have. The result is exact if the parameter has
                fewer rows or columns, or if a term is as small already.
        """
        if is_flag(rank) or operator.index(rank) < 1:
            raise UsageError(f"rank must be a positive number. Got {rank!r}.")
        size = matrix_shape(self.shape[1:])
        if min(size) <= 1 or len(self) == 0:
            return self
        factors = nearest_factors(self.product(), size, rank)
        return self if factors is None else self.from_factors(*factors, self.shape[1:])

    @exactly
    def prepared(self, most_bytes: int) -> SampleGradients:
        """The same, in the form that makes inner products with many others cheapest.

        Factors of a weight are formed again whenever they meet other gradients, unless these have
        few positions. So they are formed here, once. Rows of tables stay as they are.

        Args:
            most_bytes: If forming takes more memory, nothing is formed.
        """
        first = self._terms[0]
        if len(self._terms) > 1 or not isinstance(first, AffineProduct):
            return self
        groups, features, size = first.sizes
        formed = self.shape.numel() * self.dtype.itemsize
        by_positions = first.samples * first.positions * groups * (features + size)
        if features * size * groups > by_positions or formed > most_bytes:
            return self
        return SampleGradients.from_dense(dense(self.product()).squeeze(0))  # it is not shared

    # Stored --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The terms as named tensors, for ``torch.save`` or safetensors."""
        return {"shape": torch.tensor(self.shape, dtype=torch.int64), **state_of(self._terms)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> SampleGradients:
        """Gradients from what :meth:`state_dict` gave; tensors are not copied.

        Raises:
            UsageError: The tensors do not come from :meth:`state_dict`.
        """
        try:
            tensors = dict(state)
            shape = torch.Size(tensors.pop("shape").tolist())
            result = cls(terms_from(tensors, shape[1:]))
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            keys = ", ".join(map(str, state)) or "none"
            raise UsageError(
                f"from_state_dict takes what state_dict() gave. Got tensors named {keys}."
            ) from error
        return result


def as_gradients(value: SampleGradients | Tensor, shape: torch.Size) -> SampleGradients:
    """Gradients, or directions ``[M, *θ]`` or ``[*θ]``, of a parameter with a shape.

    Raises:
        ShapeError: They belong to another parameter.
        UsageError: They are not gradients or a tensor.
    """
    if isinstance(value, Tensor):
        value = SampleGradients.from_dense(value.unsqueeze(0) if value.shape == shape else value)
    given: object = value
    if not isinstance(given, SampleGradients):
        raise UsageError(f"Gradients must be SampleGradients or a tensor. Got {given!r:.80}.")
    if given.shape[1:] != shape:
        expected = f"[M, {str([*shape])[1:-1]}]"
        raise ShapeError(f"The parameter has gradients {expected}. Got {[*given.shape]}.")
    return given
