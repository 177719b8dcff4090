"""Random projections of individual gradients, without forming these as a whole."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from backpack_core.contract.extension import FailMode
from backpack_core.errors import UsageError
from backpack_firstorder.divisors import Divisors, divided_by, see_divisors
from backpack_firstorder.names import name_of
from backpack_firstorder.plain import plain_terms
from backpack_firstorder.single import in_single
from backpack_firstorder.sketches import Gaussian, Kronecker, Rademacher, Sketch, Sparse
from backpack_firstorder.squares import SquaresExtension
from backpack_firstorder.tokens import Per, as_per, entries_of
from backpack_products import SampleProduct
from backpack_products.affine import AffineProduct
from backpack_products.contractions import is_empty, products, slices
from backpack_products.lookup import LookupProduct
from backpack_products.product import DenseProduct
from backpack_products.tuning import memory_budget
from backpack_products.values import is_flag

Kind: TypeAlias = Literal["kronecker", "gaussian", "rademacher", "sparse"]
_SKETCHES: dict[str, type[Sketch]] = {
    "kronecker": Kronecker,
    "gaussian": Gaussian,
    "rademacher": Rademacher,
    "sparse": Sparse,
}


@dataclass(frozen=True)
class Projection:
    """A random linear map of gradients ``[*θ] → [dim]``, a different one for every parameter.

    It is a function of its settings and of the parameter's name and shape. It is the same on every
    rank and machine (normal numbers up to rounding).

    Attributes:
        dim: The length of projected gradients.
        kind: See :class:`ProjectedGrad`.
        seed: Another seed gives another map.
    """

    dim: int
    kind: Kind = "kronecker"
    seed: int = 0

    def __post_init__(self) -> None:
        """Look at the settings.

        Raises:
            UsageError: The dimension is not positive, or the kind is unknown.
        """
        for name, least in (("dim", 1), ("seed", None)):
            value: Any = getattr(self, name)
            if is_flag(value) or not hasattr(value, "__index__"):
                raise UsageError(f"{name} must be a whole number. Got {value!r}.")
            if least is not None and operator.index(value) < least:
                raise UsageError(f"{name} must be a positive number. Got {value!r}.")
        if self.kind not in get_args(Kind):
            raise UsageError(f"kind must be one of {get_args(Kind)}. Got {self.kind!r}.")

    def __call__(self, product: SampleProduct, name: str) -> Tensor:
        """Projected gradients ``[N, dim]``, at least in single precision.

        Args:
            product: A product of one column, ``[1, N, *θ]``.
            name: The parameter's name.
        """
        shape = product.shape
        size = (shape[0], shape[1:].numel()) if shape else (1, 1)
        sketch = _SKETCHES[self.kind](self.kind, name, self.seed, size, self.dim)
        single = in_single(product)
        total = single.new_zeros(single.samples, self.dim)
        if total.numel() and size[0] * size[1]:
            for term in plain_terms(single):
                total = total + _of_term(sketch, term)
        return total


def _of_term(sketch: Sketch, term: SampleProduct) -> Tensor:
    if isinstance(term, LookupProduct):
        return sketch.lookup(term)
    if isinstance(term, AffineProduct) and term.inp is not None and term.has_rows:
        if is_empty(term.out, term.inp):
            return term.new_zeros(term.samples, sketch.dim)
        if sketch.is_cheaper_by_factors(term.positions, term.sizes[0]):
            return sketch.affine(term.out[0], term.inp)
        return _by_features(sketch, term)
    if isinstance(term, DenseProduct) and term.values is not None:
        return _of_formed(sketch, term.values[0])
    total = term.new_zeros(term.samples, sketch.dim)
    for _, some, piece in term.pieces():
        total[some] = _of_formed(sketch, piece[0])
    return total


def _of_formed(sketch: Sketch, values: Tensor) -> Tensor:
    """Project formed gradients ``[N, *θ]``, some rows at a time."""
    values = values.reshape(len(values), *sketch.shape)
    total = values.new_zeros(len(values), sketch.dim)
    for some in slices(sketch.shape[0], sketch.most_rows()):
        rows = torch.arange(some.start, some.stop, device=values.device)
        total += sketch.formed(values[:, some], rows)
    return total


def _by_features(sketch: Sketch, term: AffineProduct) -> Tensor:
    """Project gradients that are formed for some output features at a time."""
    assert term.inp is not None
    groups, features, size = term.sizes
    total = term.new_zeros(term.samples, sketch.dim)
    single = max(1, term.samples * groups * size * term.like.element_size())
    step = max(1, min(sketch.most_rows() // groups, memory_budget() // 4 // single))
    for some in slices(features, step):
        numbers = torch.arange(some.start, some.stop, device=total.device)
        rows = torch.arange(groups, device=total.device).unsqueeze(1) * features + numbers
        values = products(term.out[..., some], term.inp)[0].flatten(1, 2)  # [N, G · o, I]
        total += sketch.formed(values, rows.flatten())
    return total


class ProjectedGrad(SquaresExtension):
    """Random projections of the individual gradients, which keep inner products in expectation.

    Stored in ``projected_grad``, shape ``[N, dim]``: ``P_θ g_n`` with the gradients ``g_n`` of
    :class:`BatchGrad`, at least in single precision. ``P_θ`` differs between parameters, with
    ``E⟨P_θ g, P_θ g'⟩ = ⟨g, g'⟩``. So the inner products of whole gradients are those of the
    projections, summed over parameters.

    - ``"kronecker"``: ``P_R ⊗ P_C`` of signs, which projects output gradients and inputs before
      they meet (Choe et al., 2024, arXiv:2405.13954, LoGra). It is by far the cheapest. ``dim`` is
      split into two nearly equal factors: take a square. A vector has only one factor.
    - ``"gaussian"``, ``"rademacher"``: a matrix of independent numbers, ``dim`` for each entry of
      the parameter. It is made anew in every pass.
    - ``"sparse"``: each entry is added to one place, with a sign (count sketch).

    Random numbers are a function of the parameter's name in the model, its shape, ``kind``,
    ``dim``, ``seed``, their role, and the version of this method: the same on every rank, device
    and machine. Two models that are extended one by one may have parameters with the same name and
    shape, and so the same ``P_θ``. Inner products stay right; if projections are added over
    parameters, extend one module that holds both. Individual gradients are never held as a whole.

    With ``per="token"``, shape ``[N, T, dim]``: the projections of each token's share of the
    gradient, see :class:`BatchGrad`.
    """

    savefield = "projected_grad"
    degree = 1
    over_batches = "concatenate"

    def __init__(
        self,
        dim: int,
        kind: Kind = "kronecker",
        seed: int = 0,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        divisors: Divisors | None = None,
        per: Per = "sample",
    ) -> None:
        """Store the settings.

        Args:
            dim: The length of a projected gradient.
            kind: See the class.
            seed: Another seed gives another projection.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: See :class:`Extension`.
            divisors: What gradients are divided by first, by parameter name, see
                :func:`~backpack_firstorder.divisors_of`.
            per: ``"sample"``, or ``"token"`` for the share of each position.

        Raises:
            UsageError: The dimension is not positive, or the kind is unknown.
        """
        super().__init__(subsampling, savefield, fail_mode)
        self.projection = Projection(dim, kind, seed)
        self.divisors, self.per = see_divisors(divisors), as_per(per)

    def read(self, product: SampleProduct) -> Tensor:
        """``P_θ g_n``."""
        name = name_of(product)
        entries, lead = entries_of(product, self.per)
        projected = self.projection(divided_by(self.divisors, entries, name), name)
        return projected.reshape(*lead, projected.shape[1])
