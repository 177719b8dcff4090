"""Operations on products, and their definitions by ``product.pieces()``, which suit any form.

Forms of products register faster versions. Those of sums are here; contractions of factors stand
with the forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from math import prod

import torch
from torch import Tensor

from backpack_products import contractions
from backpack_products.open_functions import OpenFunction, Operation
from backpack_products.product import DenseProduct, Piece, SampleProduct, SumProduct
from backpack_products.tuning import LARGE


@Operation
def dense(product: SampleProduct) -> Tensor:
    """``M`` itself. Shape ``[V, N, *θ]``."""
    return formed(product)


@OpenFunction
def formed(product: SampleProduct) -> Tensor:
    """``M``, which :func:`dense` stores. A version may store results of other ``needs`` as well."""
    return product.part(slice(0, product.columns), slice(0, product.samples))


@Operation
def square_sum(product: SampleProduct) -> Tensor:
    """``Σ_v Σ_n M[v, n]²``. Shape ``[*θ]``."""
    values = _values(product)
    if values is not None and values.numel() < LARGE:
        return values.square().sum((0, 1))
    result = product.new_zeros(*product.shape)
    for _, _, part in _pieces(product):
        result = contractions.add_squares(result, part.flatten(0, 1))
    return result


@Operation
def per_sample_square_sum(product: SampleProduct) -> Tensor:
    """``Σ_v M[v, n]²``. Shape ``[N, *θ]``."""
    values = _values(product)
    if values is not None and values.numel() < LARGE:
        return values.square().sum(0)
    result = product.new_zeros(product.samples, *product.shape)
    for _, samples, part in _pieces(product):
        result[samples] += part.square().sum(0)
    return result


@Operation
def squared_norm(product: SampleProduct) -> Tensor:
    """``‖M[v, n]‖²``. Shape ``[V, N]``."""
    values = _values(product)
    if values is not None:
        return contractions.square_norm_of(contractions.flattened(values, 2))
    result = product.new_zeros(product.columns, product.samples)
    for columns, samples, part in _pieces(product):
        result[columns, samples] = contractions.square_norm_of(contractions.flattened(part, 2))
    return result


@Operation
def batch_sum(product: SampleProduct) -> Tensor:
    """``Σ_n M[v, n]``. Shape ``[V, *θ]``."""
    values = _values(product)
    if values is not None:
        return values.sum(1)
    result = product.new_zeros(product.columns, *product.shape)
    for columns, _, part in _pieces(product):
        result[columns] += part.sum(1)
    return result


@Operation
def gram(product: SampleProduct) -> Tensor:
    """``⟨M[v, n], M[w, m]⟩``. Shape ``[V, N, V, N]``."""
    flat = contractions.flattened(dense(product), 2).flatten(0, 1)
    lead = (product.columns, product.samples)
    return (flat @ flat.T).reshape(*lead, *lead)


@OpenFunction
def weighted_sum(product: SampleProduct, weights: Tensor) -> Tensor:
    """``Σ_v Σ_n weights[k, v, n] M[v, n]``.

    Args:
        product: ``M``.
        weights: Shape ``[K, V, N]``.

    Returns:
        Shape ``[K, *θ]``.
    """
    values = _values(product)
    if values is not None and values.is_contiguous():
        flat = values.view(values.shape[:2].numel(), prod(product.shape))
        return (weights.flatten(1) @ flat).view(len(weights), *product.shape)
    result = product.new_zeros(len(weights), *product.shape)
    for columns, samples, part in _pieces(product):
        some = weights[:, columns, samples].flatten(1)
        result += (some @ part.reshape(some.shape[1], prod(product.shape))).view_as(result)
    return result


@Operation
def read_together(product: SampleProduct) -> Mapping[Operation[Tensor], Tensor]:
    """Results of several of a product's ``needs``, by operation, if one reading can give them."""
    return {}


@OpenFunction
def has_free_sum(product: SampleProduct) -> bool:
    """Whether :func:`batch_sum` costs at most one more reading than the other ``needs``."""
    return False


def _values(product: SampleProduct) -> Tensor | None:
    """``M`` if it is formed, else ``None``."""
    if isinstance(product, DenseProduct):
        return product.values
    return dense(product) if is_formed(product) else None


def _pieces(product: SampleProduct) -> Iterator[Piece]:
    """The pieces of ``M``, cut from the formed ``M`` if it exists."""
    return as_formed(product).pieces() if is_formed(product) else product.pieces()


def as_formed(product: SampleProduct) -> DenseProduct:
    """The product with ``M`` formed."""
    return DenseProduct(dense(product))


def is_formed(product: SampleProduct) -> bool:
    """Whether ``M`` is formed, or will be for another extension: then reading it costs least."""
    return dense in product.needs or (dense,) in product.results


# Sums ---------------------------------------------------------------------------------------------


@batch_sum.register
def batch_sum_sum(product: SumProduct) -> Tensor:
    """The sum over the parts."""
    return reduce(torch.add, map(batch_sum, product.parts))


@weighted_sum.register
def weighted_sum_sum(product: SumProduct, weights: Tensor) -> Tensor:
    """The sum over the parts."""
    return reduce(torch.add, (weighted_sum(part, weights) for part in product.parts))
