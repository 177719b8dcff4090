"""What is read off at a parameter: open functions of a product.

An operation dispatches on the form of the product and keeps its result on it. It is no method, so
that someone who needs a new one is not second class: write its definition through
``product.pieces()``, and register a contraction for the forms that allow one.

    @Operation
    def largest(product: SampleProduct) -> Tensor: ...

    @largest.register
    def largest_affine(product: AffineProduct) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from backpack_core.contract import contractions
from backpack_core.contract.product import (
    AffineProduct,
    DenseProduct,
    LookupProduct,
    SampleProduct,
    ScaleProduct,
    SumProduct,
)

R = TypeVar("R")
P = ParamSpec("P")


class Operation(Generic[R]):
    """A function of a product, open to faster versions for some forms.

    Further arguments have to be hashable values (a setting); a function of tensors is a plain
    function with ``singledispatch``.
    """

    def __init__(self, definition: Callable[..., R]) -> None:
        """Take the definition, which holds for every form."""
        self._dispatch = singledispatch(definition)
        self.__name__ = ""
        update_wrapper(self, definition)

    def register(self, version: Callable[..., R]) -> Callable[..., R]:
        """Use a function for the form that its first argument is annotated with."""
        registered: Callable[..., R] = self._dispatch.register(version)
        return registered

    def has_version(self, form: type[SampleProduct]) -> bool:
        """Whether a form has a version of its own, beside the definition for all."""
        return self._dispatch.dispatch(form) is not self._dispatch.dispatch(object)

    def __call__(self, product: SampleProduct, *settings: Any) -> R:
        """The result for a product: computed once, and nobody's to change."""
        key = (self, *settings)
        if key not in product.results:
            product.results[key] = self._dispatch(product, *settings)
        result: R = product.results[key]
        return result

    def __repr__(self) -> str:
        """The name."""
        return f"<operation {self.__name__}>"


# Definitions --------------------------------------------------------------------------------------


@Operation
def dense(product: SampleProduct) -> Tensor:
    """``M`` itself. Shape ``[V, N, *θ]``."""
    return product.part(slice(0, product.columns), slice(0, product.samples))


@Operation
def square_sum(product: SampleProduct) -> Tensor:
    """``Σ_v Σ_n M[v, n]²``. Shape ``[*θ]``."""
    result = product.new_zeros(*product.shape)
    for _, _, part in _pieces(product):
        result = contractions.add_squares(result, part.flatten(0, 1))
    return result


@Operation
def per_sample_square_sum(product: SampleProduct) -> Tensor:
    """``Σ_v M[v, n]²``. Shape ``[N, *θ]``."""
    result = product.new_zeros(product.samples, *product.shape)
    for _, samples, part in _pieces(product):
        result[samples] += part.square().sum(0)
    return result


@Operation
def squared_norm(product: SampleProduct) -> Tensor:
    """``‖M[v, n]‖²``. Shape ``[V, N]``."""
    result = product.new_zeros(product.columns, product.samples)
    for columns, samples, part in _pieces(product):
        result[columns, samples] = part.flatten(2).square().sum(2)
    return result


@Operation
def batch_sum(product: SampleProduct) -> Tensor:
    """``Σ_n M[v, n]``. Shape ``[V, *θ]``."""
    result = product.new_zeros(product.columns, *product.shape)
    for columns, _, part in _pieces(product):
        result[columns] += part.sum(1)
    return result


@Operation
def gram(product: SampleProduct) -> Tensor:
    """``⟨M[v, n], M[w, m]⟩``. Shape ``[V, N, V, N]``."""
    flat = dense(product).flatten(2).flatten(0, 1)
    lead = (product.columns, product.samples)
    return (flat @ flat.T).reshape(*lead, *lead)


@singledispatch
def weighted_sum(product: SampleProduct, weights: Tensor) -> Tensor:
    """``Σ_v Σ_n weights[k, v, n] M[v, n]``.

    Args:
        product: ``M``.
        weights: Shape ``[K, V, N]``.

    Returns:
        Shape ``[K, *θ]``.
    """
    result = product.new_zeros(len(weights), *product.shape)
    for columns, samples, part in _pieces(product):
        result += torch.einsum("kvn,vn...->k...", weights[:, columns, samples], part)
    return result


@singledispatch
def inner(product: SampleProduct, other: SampleProduct) -> Tensor:
    """``⟨M[v, n], M'[v, n]⟩`` with another product of the same parameter. Shape ``[V, N]``."""
    if isinstance(other, LookupProduct):
        return inner_lookup(other, product)
    result = product.new_zeros(product.columns, product.samples)
    for columns, samples, part in _pieces(product):
        result[columns, samples] = (part * other.part(columns, samples)).flatten(2).sum(2)
    return result


@singledispatch
def project(product: SampleProduct, directions: Tensor) -> Tensor:
    """``⟨M[v, n], directions[k]⟩``.

    Args:
        product: ``M``.
        directions: Vectors in the space of the parameter. Shape ``[K, *θ]``.

    Returns:
        Shape ``[V, N, K]``.
    """
    result = product.new_zeros(product.columns, product.samples, len(directions))
    for columns, samples, part in _pieces(product):
        result[columns, samples] = part.flatten(2) @ directions.flatten(1).T
    return result


def _pieces(product: SampleProduct) -> Any:
    """The pieces of ``M``, of what is there already if it was formed."""
    return DenseProduct(dense(product)).pieces() if is_formed(product) else product.pieces()


def is_formed(product: SampleProduct) -> bool:
    """Whether ``M`` is there, or has to be for somebody, so that reading it costs least."""
    return dense in product.needs or (dense,) in product.results


# Affine form --------------------------------------------------------------------------------------


def reads_formed(product: AffineProduct) -> bool:
    """Whether to read ``M``: with one position only, a contraction of the factors costs less."""
    return is_formed(product) and product.positions > 1


def as_formed(product: SampleProduct) -> DenseProduct:
    """The product as it was formed."""
    return DenseProduct(dense(product))


@square_sum.register
def square_sum_affine(product: AffineProduct) -> Tensor:
    """By :func:`contractions.square_sum`, or as a by-product of what others need."""
    if product.inp is None:
        return product.to_parameter(product.out.sum(2).square().sum((0, 1)))
    if reads_formed(product):
        return square_sum(as_formed(product))
    if per_sample_square_sum in product.needs and product.positions > 1:
        return per_sample_square_sum(product).sum(0)
    if batch_sum in product.needs:
        return _moments(product)[1]
    return product.to_parameter(contractions.square_sum(product.out, product.inp))


@per_sample_square_sum.register
def per_sample_square_sum_affine(product: AffineProduct) -> Tensor:
    """By :func:`contractions.per_sample_square_sum`."""
    if product.inp is None:
        return product.to_parameter(product.out.sum(2).square().sum(0))
    if reads_formed(product):
        return per_sample_square_sum(as_formed(product))
    return product.to_parameter(contractions.per_sample_square_sum(product.out, product.inp))


@squared_norm.register
def squared_norm_affine(product: AffineProduct) -> Tensor:
    """By :func:`contractions.squared_norm`."""
    if product.inp is None:
        return product.out.sum(2).flatten(2).square().sum(2)
    if reads_formed(product):
        return squared_norm(as_formed(product))
    return contractions.squared_norm(product.out, product.inp)


@batch_sum.register
def batch_sum_affine(product: AffineProduct) -> Tensor:
    """By :func:`contractions.sums`, or as a by-product of what others need."""
    if product.inp is None:
        return product.to_parameter(product.out.sum((1, 2)))
    if reads_formed(product):
        return batch_sum(as_formed(product))
    if square_sum in product.needs and per_sample_square_sum not in product.needs:
        return _moments(product)[0]
    return product.to_parameter(contractions.sums(product.out, product.inp))


def _moments(product: AffineProduct) -> tuple[Tensor, Tensor]:
    """``Σ_n M`` and ``Σ_v Σ_n M²`` from the same pieces."""
    assert product.inp is not None
    if "moments" not in product.results:
        found = contractions.moments(product.out, product.inp)
        product.results["moments"] = tuple(map(product.to_parameter, found))
    both: tuple[Tensor, Tensor] = product.results["moments"]
    return both


@gram.register
def gram_affine(product: AffineProduct) -> Tensor:
    """By :func:`contractions.gram`."""
    if product.inp is None:
        flat = product.out.sum(2).flatten(2).flatten(0, 1)
        return (flat @ flat.T).reshape(2 * product.out.shape[:2])
    if reads_formed(product):
        return gram(as_formed(product))
    return contractions.gram(product.out, product.inp)


@weighted_sum.register
def weighted_sum_affine(product: AffineProduct, weights: Tensor) -> Tensor:
    """A plain gradient of weighted columns."""
    if product.inp is None:
        total = torch.einsum("kvn,vngo->kgo", weights, product.out.sum(2))
        return product.to_parameter(total)
    if len(weights) == product.columns == 1:
        out = product.out * weights[0, :, :, None, None, None]
    else:
        out = torch.einsum("kvn,vnsgo->knsgo", weights, product.out)
    return batch_sum(product.with_columns(out))


@inner.register
def inner_affine(product: AffineProduct, other: SampleProduct) -> Tensor:
    """Of two affine products from inner products of their factors."""
    if isinstance(other, LookupProduct):
        return inner_lookup(other, product)
    both = product.arrange is None and isinstance(other, AffineProduct) and other.arrange is None
    if not both or product.inp is None or other.inp is None or product.sizes != other.sizes:
        default: Callable[..., Tensor] = inner.dispatch(SampleProduct)
        return default(product, other)
    return contractions.inner(product.out, product.inp, other.out, other.inp)


@project.register
def project_affine(product: AffineProduct, directions: Tensor) -> Tensor:
    """``Σ_s ⟨out, direction inp⟩``."""
    if product.arrange is not None:
        default: Callable[..., Tensor] = project.dispatch(SampleProduct)
        return default(product, directions)
    matrices = directions.reshape(len(directions), *product.sizes)
    if product.inp is None:
        return torch.einsum("vngo,kgo->vnk", product.out.sum(2), matrices)
    images = torch.einsum("kgoi,nsgi->knsgo", matrices, product.inp[0 : product.samples])
    return torch.einsum("vnsgo,knsgo->vnk", product.out, images)


# Gains, tables and sums ---------------------------------------------------------------------------


@batch_sum.register
def batch_sum_scale(product: ScaleProduct) -> Tensor:
    """Samples are positions here."""
    if product.inp is None:
        total = product.out.sum((1, 2))
    else:
        total = torch.einsum("vnsd,nsd->vd", product.out, product.inp)
    return total.reshape(product.columns, *product.shape)


@square_sum.register
def square_sum_lookup(product: LookupProduct) -> Tensor:
    """Of the rows that are not zero."""
    sums, _, row = product.segments()
    return product.new_zeros(*product.shape).index_add(0, row, sums.square().sum(0))


@squared_norm.register
def squared_norm_lookup(product: LookupProduct) -> Tensor:
    """Of the rows that are not zero."""
    sums, sample, _ = product.segments()
    zeros = product.new_zeros(product.columns, product.samples)
    return zeros.index_add(1, sample, sums.square().sum(2))


@batch_sum.register
def batch_sum_lookup(product: LookupProduct) -> Tensor:
    """Of the rows that are not zero."""
    zeros = product.new_zeros(product.columns, *product.shape)
    return zeros.index_add(1, product.row.flatten(), product.out.flatten(1, 2))


@weighted_sum.register
def weighted_sum_lookup(product: LookupProduct, weights: Tensor) -> Tensor:
    """Of weighted columns."""
    out = torch.einsum("kvn,vnsd->knsd", weights, product.out)
    return batch_sum(LookupProduct(out, product.row, product.shape))


@inner.register
def inner_lookup(product: LookupProduct, other: SampleProduct) -> Tensor:
    """From the rows of the other product that were looked up."""
    if (
        isinstance(other, AffineProduct)
        and other.inp is not None
        and other.arrange is None
        and other.sizes[0] == 1
    ):
        columns = other.out.squeeze(3)  # [V, N, S, num]
        index = product.row.unsqueeze(1).expand(-1, columns.shape[2], -1)  # [N, S, K]
        found = columns.gather(3, index.expand(len(columns), -1, -1, -1))  # [V, N, S, K]
        inp = other.inp[0 : other.samples].squeeze(2)  # [N, S, dim]
        return torch.einsum("vnsk,vnkd,nsd->vn", found, product.out, inp)
    result = product.new_zeros(product.columns, product.samples)
    for columns_, samples, part in other.pieces():
        rows = product.row[samples]
        index = rows.unsqueeze(2).expand(-1, -1, part.shape[3]).expand(len(part), -1, -1, -1)
        found = part.gather(2, index)
        result[columns_, samples] = (found * product.out[columns_, samples]).sum((2, 3))
    return result


@squared_norm.register
def squared_norm_sum(product: SumProduct) -> Tensor:
    """``Σ_p ‖M_p‖² + 2 Σ_{p<q} ⟨M_p, M_q⟩``: nothing is formed that its parts do not form."""
    if is_formed(product):
        return squared_norm(as_formed(product))
    parts = product.parts
    total = squared_norm(parts[0])
    for position, part in enumerate(parts[1:], start=1):
        total = total + squared_norm(part)
        for other in parts[:position]:
            total = total + 2 * inner(other, part)
    return total.clamp(min=0)


@batch_sum.register
def batch_sum_sum(product: SumProduct) -> Tensor:
    """Part by part."""
    first, *others = map(batch_sum, product.parts)
    return sum(others, first)


@weighted_sum.register
def weighted_sum_sum(product: SumProduct, weights: Tensor) -> Tensor:
    """Part by part."""
    first, *others = (weighted_sum(part, weights) for part in product.parts)
    return sum(others, first)


@project.register
def project_sum(product: SumProduct, directions: Tensor) -> Tensor:
    """Part by part."""
    first, *others = (project(part, directions) for part in product.parts)
    return sum(others, first)
