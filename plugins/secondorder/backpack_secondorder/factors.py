"""Operations on products: Kronecker factors, and eigenvalues in the basis of factors."""

from __future__ import annotations

from functools import reduce
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from backpack_core.errors import UnsupportedError
from backpack_operations.bare import BareRule
from backpack_products import AffineRule, contractions
from backpack_products.affine import AffineProduct
from backpack_products.held import held_by
from backpack_products.multiply import multiply
from backpack_products.open_functions import OpenFunction, Operation
from backpack_products.product import SampleProduct, SumProduct
from backpack_products.rows import JoinedRows, Rows
from backpack_products.values import memory_of
from backpack_secondorder import covariances
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import Number, ParameterOrder

WeightSharing: TypeAlias = Literal["kfc", "expand", "reduce"]


class StructureError(UnsupportedError):
    """A parameter has no Kronecker factors."""

    in_manual = True


@Operation
def block(product: SampleProduct) -> Tensor:
    """The exact block ``Σ_v Σ_n M[v, n] M[v, n]ᵀ``. Shape ``[P, P]``."""
    size = product.shape.numel()
    total = product.new_zeros(size, size)
    for _, _, part in product.pieces():
        vectors = part.reshape(part.shape[:2].numel(), size)
        total = torch.addmm(total, vectors.T, vectors)
    return total


@Operation
def kronecker_factors(product: SampleProduct, sharing: WeightSharing = "kfc") -> KroneckerFactors:
    """Factors with a Kronecker product that approximates ``Σ_v Σ_n M[v, n] M[v, n]ᵀ``.

    A vector (such as the gain of a normalisation) is small enough for its exact block as the only
    factor. So are a single number, and a matrix of one row or column without other factors.

    Args:
        product: ``M``.
        sharing: How positions that share the weight are treated; see :func:`input_covariance`.

    Raises:
        StructureError: The product has no such structure, or is a sum of several.
    """
    if max(product.shape, default=1) == product.shape.numel():
        return KroneckerFactors([block(product)], ParameterOrder.of(product))
    instead = (
        'use fail_mode="block" or "diagonal", which store these instead, or DiagGGNExact, which '
        "needs no structure."
    )
    if isinstance(product, SumProduct):
        forms = ", ".join(sorted({type(part).__name__ for part in product.parts}))
        raise StructureError(
            f"The {len(product.parts)} uses of the parameter {product.name!r} of {product.path} "
            f"have no common Kronecker factors: their products have the forms {forms}. Uses in "
            "different orders (other than transposed), or of a tensor that is computed from the "
            "parameter (a parametrization, pruning), have none. Untie the uses, freeze the "
            f"parameter, {instead}"
        )
    if issubclass(product.rule, AffineRule):
        raise StructureError(
            f"Kronecker structure is needed for the parameter {product.name!r} of {product.path}, "
            "but the module uses a tensor that is computed from it (a parametrization, pruning, "
            f"weight normalisation). Remove the computation, freeze the parameter, {instead}"
        )
    if issubclass(product.rule, BareRule):
        raise StructureError(
            f"Kronecker structure is needed for the parameter {product.name!r} of {product.path}, "
            f"but single operations use it: {_why_bare(product)}. Or freeze the parameter, "
            f"{instead}"
        )
    raise StructureError(
        f"Kronecker structure is needed for the parameter {product.name!r} of {product.path}, but "
        f"{product.rule.__name__} declares none: freeze the parameter, {instead} For a "
        "layer that is affine in it, derive the rule from AffineRule."
    )


def _why_bare(product: SampleProduct) -> str:
    """Why a parameter is read at operations instead of at a layer rule, for error messages."""
    if getattr(product.module, "batch_first", True):
        return (
            "a function uses it (F.linear(x, module.weight)), or the module has samples on another "
            "axis than its layer rule expects. Call the module, with samples on axis 0"
        )
    return (
        "no layer rule takes batch_first=False: its axis 0 holds time steps. Build the module "
        "with batch_first=True, which changes no weight, and call it with x.transpose(0, 1)"
    )


@kronecker_factors.register
def kronecker_factors_affine(
    product: AffineProduct, sharing: WeightSharing = "kfc"
) -> KroneckerFactors:
    """``[B, A]`` for a weight; the exact block for a bias, or a vector that rows multiply."""
    is_vector = product.inp is not None and len(product.shape) < 2
    if is_vector or (product.inp is None and not _is_ordered(product)):
        return KroneckerFactors([block(product)], ParameterOrder.of(product))
    # With one position, weight and bias share the factor B.
    expanded = sharing == "expand" and product.inp is not None and product.positions > 1
    outer = output_covariance(product, "expand" if expanded else "kfc")
    if product.inp is None:
        return KroneckerFactors([outer], ParameterOrder.of(product))
    inner = kept_input_covariance(product, sharing)
    return KroneckerFactors([outer, inner], parameter_order(product))


@Operation
def corrected_eigenbasis(
    product: SampleProduct, sharing: WeightSharing = "kfc"
) -> KroneckerEigenbasis:
    """Eigenvectors ``Q`` of the Kronecker product, with ``diag(Qᵀ G Q)`` as eigenvalues.

    ``G = Σ_v Σ_n M[v, n] M[v, n]ᵀ`` is the block that :func:`kronecker_factors` approximates, so
    this is the best approximation with these eigenvectors (George et al., 2018, arXiv:1806.03884).
    It takes the same arguments.
    """
    basis = kronecker_factors(product, sharing).decomposed(product.is_measured)
    if len(basis.vectors) == 1:
        return basis  # the eigenvalues are those of the block
    return corrected(basis, eigenvalues_in(product, basis))


@corrected_eigenbasis.register
def corrected_eigenbasis_affine(
    product: AffineProduct, sharing: WeightSharing = "kfc"
) -> KroneckerEigenbasis:
    """The basis for a weight; the exact block of a vector needs no correction."""
    basis = kronecker_factors(product, sharing).decomposed(product.is_measured)
    if len(basis.vectors) == 1:
        return basis
    return corrected(basis, eigenvalues_in_affine(product, basis))


def corrected(basis: KroneckerEigenbasis, values: Tensor) -> KroneckerEigenbasis:
    """A basis with corrected eigenvalues, in which rounding errors are set to zero.

    If the factors send a direction to zero, so does the block of the same data. There the computed
    eigenvalue is a rounding error, which must not be inverted.
    """
    axes = tuple(range(values.dim() - len(basis.vectors), values.dim()))
    rounding = max(values.shape, default=1) * torch.finfo(values.dtype).eps
    bound = rounding * values.amax(axes, keepdim=True) if values.numel() else values
    is_zero = (basis.values == 0) & (values <= bound)
    return basis.with_values(torch.where(is_zero, 0.0, values))


@OpenFunction
def eigenvalues_in(product: SampleProduct, basis: KroneckerEigenbasis) -> Tensor:
    """``diag(Qᵀ G Q)`` for given eigenvectors ``Q``, in the shape of ``basis.values``.

    They are ``Σ_v Σ_n (Qᵀ M[v, n])²``, so values of disjoint sets of samples or columns add up.

    Args:
        product: ``M``.
        basis: Holds ``Q``; its eigenvalues are not read.
    """
    total = product.new_zeros(basis.values.numel())
    for _, _, part in product.pieces():
        total = total + basis.rotate(part.flatten(0, 1)).square().sum(0)
    return total.reshape(basis.values.shape)


@eigenvalues_in.register
def eigenvalues_in_affine(product: AffineProduct, basis: KroneckerEigenbasis) -> Tensor:
    """The same from rotated factors, without forming ``M``."""
    if len(basis.vectors) != 2 or product.inp is None:
        return eigenvalues_in.definition(product, basis)
    outer, inner = basis.vectors
    columns = product.out if outer is None else _rotate(product.out, outer)
    inputs = product.inp if inner is None else RotatedRows(product.inp, inner)
    return contractions.square_sum(columns, inputs).reshape(basis.values.shape)


class RotatedRows:
    """Inputs ``[N, S, G, I]`` times ``[I, I]`` or ``[G, I, I]``, for some samples at a time."""

    def __init__(self, inp: Rows, matrix: Tensor) -> None:
        """Store the inputs and the rotation."""
        self._inp, self._matrix = inp, matrix
        self.shape = inp.shape

    def __getitem__(self, samples: slice) -> Tensor:
        """The rotated inputs of some samples."""
        return _rotate(self._inp[samples], self._matrix)


def _rotate(vectors: Tensor, matrix: Tensor) -> Tensor:
    """``[..., G, D]`` times ``[D, D]`` or ``[G, D, D]``."""
    if matrix.dim() == 2:
        return multiply(vectors.flatten(0, -2), matrix).view(vectors.shape)
    return (vectors.unsqueeze(-2) @ matrix).squeeze(-2)


def output_covariance(product: AffineProduct, sharing: WeightSharing = "kfc") -> Tensor:
    """``B``: ``Σ_v Σ_n g gᵀ`` with ``g`` summed over positions, or for each position if expanded.

    Args:
        product: Holds columns ``[V, N, S, G, O]``.
        sharing: How positions are treated.

    Returns:
        Shape ``[O, O]``, or ``[G, O, O]`` for a layer with groups.
    """
    out = product.out
    # Weight and bias of an affine layer have the same columns.
    key = ("covariance", sharing == "expand", *_place(out))
    if key not in product.column_cache:
        if sharing == "expand" or out.shape[2] == 1:
            vectors = out.flatten(0, 2)  # [V·N·S, G, O]
        else:
            vectors = out.sum(2).flatten(0, 1)  # [V·N, G, O]
        # The columns are stored, too: while they live, no other tensor can get their address,
        # which is the key.
        product.column_cache[key] = out, _without_groups(covariances.outer(vectors))
    factor: Tensor = product.column_cache[key][1]
    return factor


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The memory address and layout of a tensor, as a key."""
    return memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _is_ordered(product: AffineProduct) -> bool:
    """Whether a bias has one group, and is stored in the order of the outputs."""
    groups, size = product.sizes
    if groups > 1 or product.arrange is None:
        return groups == 1
    order = torch.arange(size, device="cpu").unsqueeze(
        0
    )  # on the host, so that nothing waits for a device
    return bool(torch.equal(product.to_parameter(order).flatten(), order[0]))


def kept_input_covariance(product: AffineProduct, sharing: WeightSharing) -> Tensor:
    """:func:`input_covariance`, computed once: chunks of columns share the same inputs."""
    assert product.inp is not None
    is_differentiable = torch.is_grad_enabled()
    key = (
        "covariance",
        product.name,
        product.inp.shape,
        sharing,
        product.like.dtype,
        is_differentiable,
    )
    # Columns that reach other uses have other inputs, possibly of the same shape.
    place = [_place(tensor) for tensor in _tensors(product.inp)]
    if key not in product.call_cache or product.call_cache[key][1] != place:
        covariance = input_covariance(product.inp, product.like, sharing, product.is_own)
        # The inputs are stored, too, so that no other tensor can get their address.
        product.call_cache[key] = covariance, place, JoinedRows(product.inp)
    factor: Tensor = product.call_cache[key][0]
    return factor


def _tensors(inp: Rows) -> list[Tensor]:
    """The tensors that inputs are made of."""
    if isinstance(inp, JoinedRows):
        return [tensor for part in inp.parts for tensor in _tensors(part)]
    return [inp] if isinstance(inp, Tensor) else [tensor for tensor, _ in held_by(inp)]


def input_covariance(
    inp: Rows, like: Tensor, sharing: WeightSharing = "kfc", is_own: Tensor | None = None
) -> Tensor:
    """``A``, an average over the ``N`` samples of the view.

    ``"kfc"``: ``1/N Σ_n Σ_s x xᵀ`` (Grosse and Martens, 2016, eq. 32); ``"expand"``: ``1/(N S)
    Σ_n Σ_s x xᵀ``; ``"reduce"``: ``1/N Σ_n x̄ x̄ᵀ`` with the mean ``x̄`` over positions (Eschenhagen
    et al., 2023, eq. 19 and 22). If several modules use a weight, the positions of all of them
    share it.

    Args:
        inp: What the weight multiplies. Shape ``[N, S, G, I]``.
        like: A tensor of the dtype.
        sharing: How positions are treated.
        is_own: Which positions each sample has, ``[N, S]``; ``None`` for all. With it, the ``S`` of
            an average differs between samples.

    Returns:
        Shape ``[I, I]``, or ``[G, I, I]`` for a layer with groups.
    """
    samples, positions = inp.shape[:2]
    if is_own is not None and sharing == "reduce":
        means = inp[:].sum(1) / is_own.sum(1).clamp(min=1)[:, None, None]
        return _without_groups(covariances.outer(means, 1 / max(1, samples)))
    count = samples * positions if sharing == "expand" else samples
    scale = 1 / count if count else 0.0
    total = covariances.outer_sum(inp, like.element_size(), scale, mean=sharing == "reduce")
    if is_own is not None and sharing == "expand":  # the number stays on the device
        total = total * (count / is_own.sum().clamp(min=1))
    return _without_groups(total)


def parameter_order(product: AffineProduct) -> ParameterOrder:
    """How the rows of ``B ⊗ A`` number the entries of a weight of sizes ``(G, O, I)``."""
    if product.is_in_order:
        return ParameterOrder.of(product)
    numbers = torch.arange(product.shape.numel(), device=product.like.device)
    found = product.to_parameter(numbers.reshape(product.sizes)).flatten()
    return ParameterOrder.of(product, torch.empty_like(found).scatter_(0, found, numbers))


def weight_of(product: SampleProduct) -> Number:
    """``Σ_n s``: the number of samples times the factor ``s`` of each sample's loss.

    It is one for a mean over the batch, and the number of samples for a sum; one if unknown.
    """
    scales = [root.scale for root in product.roots if root.scale is not None]
    return product.samples * reduce(torch.maximum, scales) if scales else 1.0


def _without_groups(factor: Tensor) -> Tensor:
    """``[1, D, D]`` as ``[D, D]``."""
    return factor.squeeze(0) if len(factor) == 1 else factor
