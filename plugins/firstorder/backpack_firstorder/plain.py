"""Products as sums of a few plain terms, which can be stored, paired and projected.

A term is an affine product in the order of its factors, a table whose rows are looked up, or a
formed tensor. The products of offsets and gains are small, so these are formed.
"""

from __future__ import annotations

from torch import Tensor

from backpack_products.affine import AffineProduct
from backpack_products.open_functions import OpenFunction
from backpack_products.operations import as_formed, is_formed
from backpack_products.product import DenseProduct, SampleProduct, SumProduct, sum_of
from backpack_products.rows import whole
from backpack_products.scale import ScaleProduct


def plain_terms(product: SampleProduct) -> list[SampleProduct]:
    """Terms that add up to the product, of one column; affine ones have different sizes.

    Args:
        product: ``M``, ``[1, N, *θ]``. If it is formed already, that is the only term.
    """
    if is_formed(product):
        return [as_formed(product)]
    # Summands of a sum have its columns, and need not store them.
    whole = sum_of([_placed(plain(part), product) for part in _parts(product)])
    return [*whole.parts] if isinstance(whole, SumProduct) else [whole]


def _parts(product: SampleProduct) -> list[SampleProduct]:
    if not isinstance(product, SumProduct):
        return [product]
    return [inner for part in product.parts for inner in _parts(part)]


def _placed(term: SampleProduct, product: SampleProduct) -> SampleProduct:
    """A term with the roots of the product that it is a summand of."""
    term.roots = product.roots
    return term


@OpenFunction
def plain(product: SampleProduct) -> SampleProduct:
    """A product as a term; default: unchanged."""
    return product


@plain.register
def _plain_scale(product: ScaleProduct) -> SampleProduct:
    return DenseProduct(_formed(product))


@plain.register
def _plain_affine(product: AffineProduct) -> SampleProduct:
    inp = product.inp
    if inp is None:
        return DenseProduct(_formed(product))
    if not product.is_in_order:
        # Stored with inputs first: the factors take each other's place.
        if product.sizes[0] > 1 or not _is_turned(product):
            return product
        out, rows = whole(inp).unsqueeze(0), product.out.squeeze(0)
        return AffineProduct(out, rows, product.shape)
    ordered = AffineProduct(product.out, inp, product.shape)
    return AffineProduct(*ordered.factors(inp), product.shape)


def _formed(product: SampleProduct) -> Tensor:
    """``M``, without storing it on the product: it is needed only here."""
    return product.part(slice(0, product.columns), slice(0, product.samples))


def _is_turned(product: AffineProduct) -> bool:
    """Whether a weight is a transposed matrix of the factors."""
    _, features, size = product.sizes
    if (seen := product.arranged_view()) is not None:
        return seen.shape == (size, features) and seen.stride() == (1, size)
    return product.has_order(lambda numbers: numbers.mT)
