"""Operations: functions of a product that may have faster versions for its form.

An operation keeps its result on the product, for other extensions. It is not a method, so that
anybody can add a new one: write its definition through ``product.pieces()``, and register a
contraction for the forms that allow one. Definitions are here, with the versions for sums;
contractions of factors stand with the forms that have them.

    @Operation
    def largest(product: SampleProduct) -> Tensor: ...

    @largest.register
    def largest_affine(product: AffineProduct) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce, update_wrapper
from math import prod
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from backpack_core.discovery import spelled_out, version_of
from backpack_core.errors import PluginError
from backpack_core.tuning import LARGE
from backpack_products import contractions
from backpack_products.product import DenseProduct, Piece, SampleProduct, SumProduct

R = TypeVar("R")


class OpenFunction(Generic[R]):
    """A function of a product, to which anybody may add versions for single forms.

    Two versions for one form, from two packages, are a conflict. It raises when such a product is
    met, unless :func:`backpack_core.prefer` chooses.
    """

    def __init__(self, definition: Callable[..., R]) -> None:
        """Take the definition, which works for every form."""
        self.definition = definition
        self._versions: dict[type, dict[str, Callable[..., R]]] = {}  # by form and package
        self._found: dict[type, Callable[..., R]] = {}  # the function for a form, once known
        self.__name__ = ""
        update_wrapper(self, definition)

    def register(self, version: Callable[..., R]) -> Callable[..., R]:
        """Use a function for the form, or forms, that its first argument is annotated with.

        Raises:
            PluginError: It is annotated with none.
        """
        form = next(iter(get_type_hints(version).values()), None)
        for each in get_args(form) or (form,):
            if not (isinstance(each, type) and issubclass(each, SampleProduct)):
                raise PluginError(
                    f"{self.__name__}.register takes a function whose first argument is annotated "
                    f"with a form, as (product: AffineProduct). Got {version!r}, with {each!r}."
                )
            self._versions.setdefault(each, {})[version.__module__.partition(".")[0]] = version
        self._found = {}  # what another thread is looking up meanwhile goes into the old one
        return version

    def has_version(self, form: type[SampleProduct]) -> bool:
        """Whether a form has a version besides the definition."""
        return not self._versions.keys().isdisjoint(form.__mro__)

    def _version_for(self, form: type) -> Callable[..., R]:
        """The function to call for a form.

        Raises:
            PluginConflictError: Several packages have one, and none is preferred.
        """
        known = self._found
        its = next(filter(self._versions.__contains__, form.__mro__), None)
        versions = {"": self.definition} if its is None else self._versions[its]
        found = version_of(versions, f"{self.__name__}/{spelled_out(its or form)}")
        if len(versions) == 1:  # else a preference decides, which may change
            known[form] = found
        return found

    def __call__(self, product: SampleProduct, *arguments: Any) -> R:
        """The result for a product."""
        form = type(product)
        return (self._found.get(form) or self._version_for(form))(product, *arguments)

    def __repr__(self) -> str:
        """The name."""
        return f"<operation {self.__name__}>"

    def __reduce__(self) -> str:
        """Copies and pickles refer to the one object of that name."""
        return self.__name__


class Operation(OpenFunction[R]):
    """An open function whose result is kept on the product.

    Further arguments have to be hashable values (a setting). A function of further tensors is an
    :class:`OpenFunction`.
    """

    def __call__(self, product: SampleProduct, *settings: Any) -> R:
        """The result for a product: computed once, and not to be changed."""
        key, form = (self, *settings), type(product)
        results = product.results
        result: R | None = results.get(key)
        if result is None:
            version = self._found.get(form) or self._version_for(form)
            result = results[key] = version(product, *settings)
            if isinstance(result, Tensor):
                product.made += ((result, result._version),)
        return result


# Definitions --------------------------------------------------------------------------------------


@Operation
def dense(product: SampleProduct) -> Tensor:
    """``M`` itself. Shape ``[V, N, *θ]``."""
    return formed(product)


@OpenFunction
def formed(product: SampleProduct) -> Tensor:
    """What :func:`dense` keeps. A version may keep results of other ``needs`` along with it."""
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
    """Results of several of a product's ``needs``, from one reading; by operation. Open, too."""
    return {}


@OpenFunction
def has_free_sum(product: SampleProduct) -> bool:
    """Whether :func:`batch_sum` comes with what else is needed, for one more reading at most."""
    return False


def _values(product: SampleProduct) -> Tensor | None:
    """``M`` if it has been formed, else ``None``."""
    if isinstance(product, DenseProduct):
        return product.values
    return dense(product) if is_formed(product) else None


def _pieces(product: SampleProduct) -> Iterator[Piece]:
    """The pieces of ``M``, cut from the formed ``M`` if there is one."""
    return as_formed(product).pieces() if is_formed(product) else product.pieces()


def as_formed(product: SampleProduct) -> DenseProduct:
    """The product with ``M`` formed."""
    return DenseProduct(dense(product))


def is_formed(product: SampleProduct) -> bool:
    """Whether ``M`` has been formed, or will be for somebody: then reading it costs least."""
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
