"""Products as sums of a few plain terms, which can be stored, paired and projected.

A term is an affine product in the order of its factors, a table whose rows are looked up, or a
formed tensor. The products of offsets and gains are small, so these are formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products.affine import AffineProduct
from backpack_products.open_functions import OpenFunction
from backpack_products.operations import as_formed, is_formed
from backpack_products.product import DenseProduct, SampleProduct, SumProduct, sum_of
from backpack_products.rows import whole
from backpack_products.scale import ScaleProduct
from backpack_products.values import is_same_memory


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
    if product.arrange is not None and not _is_in_order(product):
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


def _is_in_order(product: AffineProduct) -> bool:
    """Whether a weight's entries are in the order of the factors."""
    blank, seen = _arranged(product)
    if is_same_memory(seen, blank) and seen.is_contiguous():
        return True
    return not _is_view(blank, seen) and _has_order(product, torch.Tensor.flatten)


def _is_turned(product: AffineProduct) -> bool:
    """Whether a weight is a transposed matrix of the factors."""
    blank, seen = _arranged(product)
    _, features, size = product.sizes
    if _is_view(blank, seen):
        return seen.shape == (size, features) and seen.stride() == (1, size)
    return _has_order(product, lambda numbers: numbers.mT.flatten())


def _arranged(product: AffineProduct) -> tuple[Tensor, Tensor]:
    """Memory in the layout of the factors, and what the arrangement makes of it."""
    blank = torch.empty(product.sizes, dtype=torch.int8, device=product.like.device)
    return blank, product.to_parameter(blank)


def _is_view(blank: Tensor, seen: Tensor) -> bool:
    return blank.numel() > 0 and is_same_memory(seen, blank)


def _has_order(product: AffineProduct, order: object) -> bool:
    """Whether the entries have an order; on the device of the factors, as arrangements may be."""
    if product.shape.numel() != torch.Size(product.sizes).numel():
        return False
    numbers = torch.arange(product.shape.numel(), device=product.like.device)
    numbers = numbers.reshape(product.sizes)
    return torch.equal(product.to_parameter(numbers).flatten(), order(numbers))  # type: ignore[operator]
