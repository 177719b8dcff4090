"""What is read off at a parameter: open functions of a product.

An operation dispatches on the form of the product and keeps its result on it. It is no method, so
that someone who needs a new one is not second class: write its definition through
``product.pieces()``, and register a contraction for the forms that allow one. Definitions are here,
with what holds for sums; contractions of factors stand with the forms that have them.

    @Operation
    def largest(product: SampleProduct) -> Tensor: ...

    @largest.register
    def largest_affine(product: AffineProduct) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce, singledispatch, update_wrapper
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from backpack_core.contract import contractions
from backpack_core.contract.product import DenseProduct, Piece, SampleProduct, SumProduct
from backpack_core.tuning import LARGE

R = TypeVar("R")


class Operation(Generic[R]):
    """A function of a product, open to faster versions for some forms.

    Further arguments have to be hashable values (a setting); a function of tensors is a plain
    function with ``singledispatch``.
    """

    def __init__(self, definition: Callable[..., R]) -> None:
        """Take the definition, which holds for every form."""
        self._dispatch = singledispatch(definition)
        self._found: dict[type, Callable[..., R]] = {}  # what a form leads to: a plain look-up
        self.__name__ = ""
        update_wrapper(self, definition)

    def register(self, version: Callable[..., R]) -> Callable[..., R]:
        """Use a function for the form that its first argument is annotated with."""
        registered: Callable[..., R] = self._dispatch.register(version)
        self._found.clear()
        return registered

    def has_version(self, form: type[SampleProduct]) -> bool:
        """Whether a form has a version of its own, beside the definition for all."""
        return self._dispatch.dispatch(form) is not self._dispatch.dispatch(object)

    def __call__(self, product: SampleProduct, *settings: Any) -> R:
        """The result for a product: computed once, and nobody's to change."""
        key, form = (self, *settings), type(product)
        result: R | None = product.results.get(key)
        if result is None:
            if form not in self._found:
                self._found[form] = self._dispatch.dispatch(form)
            result = product.results[key] = self._found[form](product, *settings)
            if isinstance(result, Tensor):
                product.made.append((result, result._version))
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
        return contractions.square_norm_of(_flat(values))
    result = product.new_zeros(product.columns, product.samples)
    for columns, samples, part in _pieces(product):
        result[columns, samples] = contractions.square_norm_of(_flat(part))
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
    flat = _flat(dense(product)).flatten(0, 1)
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
    """What one reading of a product gives for several of its ``needs``, by operation: open, too."""
    return {}


@singledispatch
def has_free_sum(product: SampleProduct) -> bool:
    """Whether :func:`batch_sum` comes with what else is needed, at no more than its reading."""
    return False


def _values(product: SampleProduct) -> Tensor | None:
    """``M``, if it is there."""
    if isinstance(product, DenseProduct):
        return product.values
    return dense(product) if is_formed(product) else None


def _pieces(product: SampleProduct) -> Iterator[Piece]:
    """The pieces of ``M``, of what is there already if it was formed."""
    return as_formed(product).pieces() if is_formed(product) else product.pieces()


def as_formed(product: SampleProduct) -> DenseProduct:
    """The product as it was formed."""
    return DenseProduct(dense(product))


def is_formed(product: SampleProduct) -> bool:
    """Whether ``M`` is there, or has to be for somebody, so that reading it costs least."""
    return dense in product.needs or (dense,) in product.results


# Sums ---------------------------------------------------------------------------------------------


@batch_sum.register
def batch_sum_sum(product: SumProduct) -> Tensor:
    """Part by part."""
    return reduce(torch.add, map(batch_sum, product.parts))


@weighted_sum.register
def weighted_sum_sum(product: SumProduct, weights: Tensor) -> Tensor:
    """Part by part."""
    return reduce(torch.add, (weighted_sum(part, weights) for part in product.parts))


def _flat(part: Tensor) -> Tensor:
    """Shape ``[V, N, P]``, also of a parameter that is a single number."""
    return part.flatten(2) if part.dim() > 2 else part.unsqueeze(2)
