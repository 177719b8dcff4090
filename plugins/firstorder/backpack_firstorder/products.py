"""Versions of the core's operations for norms and moments of individual gradients.

If several of sum, sum of squares, and norms are needed of one affine product, they are computed
from one formation of it. The norm of a sum of products comes from inner products of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from backpack_core.contract.affine import AffineProduct, for_weights
from backpack_core.contract.contractions import is_column, square_norm_of
from backpack_core.contract.lookup import LookupProduct
from backpack_core.contract.operations import (
    OpenFunction,
    as_formed,
    batch_sum,
    formed,
    has_free_sum,
    is_formed,
    per_sample_square_sum,
    read_together,
    square_sum,
    squared_norm,
)
from backpack_core.contract.product import SampleProduct, SumProduct
from backpack_core.contract.rows import Rows
from backpack_core.contract.scale import ScaleProduct
from backpack_core.tuning import SUMMED
from backpack_firstorder import contractions
from backpack_firstorder.squares import bounds

# Key under which the least square that has all of its digits is kept, [V, N]; ``norms`` checks it.
LEAST = "least exact square"
_ALONG = (batch_sum, square_sum, squared_norm)  # in the order of Moments


def _of_pieces(product: AffineProduct, inp: Rows) -> tuple[bool, bool, bool]:
    """Which of sum, squares and norms to read off pieces of ``M``; never the sum alone."""
    needs = product.needs
    square = square_sum in needs and per_sample_square_sum not in needs
    norm = squared_norm in needs and product.positions > 1
    if norm and not square:  # for squares, the pieces are formed anyway
        norm = not contractions.is_gram_cheaper(*product.factors(inp), batch_sum in needs)
    return batch_sum in needs and (square or norm), square, norm


@read_together.register
def read_together_affine(product: AffineProduct) -> Mapping[Any, Tensor]:
    """For a weight that positions share: all that is wanted, from the same pieces."""
    inp = product.inp
    if inp is None or product.positions == 1:
        return {}
    wanted = _of_pieces(product, inp)
    out, inp = product.factors(inp)
    is_cut = wanted[1] and is_column(inp, out)  # cut the views once
    if sum(wanted) < 2 and not is_cut:
        return {}
    total, squares, norms = contractions.moments(out, inp, *wanted)
    found = {batch_sum: total, square_sum: squares}
    result = {key: product.to_parameter(mat) for key, mat in found.items() if mat is not None}
    return result if norms is None else {**result, squared_norm: norms}


@formed.register
def formed_affine(product: AffineProduct) -> Tensor:
    """With the moments that are needed and come cheaply; see :func:`contractions.products_with`."""
    if product.inp is None:
        return product.part(slice(0, product.columns), slice(0, product.samples))
    wanted = [operation in product.needs for operation in _ALONG]
    whole, along = contractions.products_with(*product.factors(product.inp), *wanted)
    for operation, found in zip(_ALONG, along, strict=True):
        if found is not None:
            is_norm = operation is squared_norm
            product.results[(operation,)] = found if is_norm else product.to_parameter(found)
    return product.to_parameter(whole)


@has_free_sum.register
def has_free_sum_affine(product: AffineProduct) -> bool:
    """For a bias, a product that is formed anyway, and moments, if the sum reads less."""
    if product.inp is None:
        return True
    is_formed_in_pieces = any(_of_pieces(product, product.inp)[1:])
    return product.positions >= SUMMED and (is_formed(product) or is_formed_in_pieces)


@has_free_sum.register
def has_free_sum_scale(product: ScaleProduct) -> bool:
    """Where ``M`` was formed: a gain has few entries."""
    return is_formed(product)


# Norms --------------------------------------------------------------------------------------------


@for_weights(squared_norm)
def squared_norm_affine(product: AffineProduct, inp: Rows) -> Tensor:
    """By :func:`contractions.squared_norm`."""
    squares, weights = contractions.weighed_norm(*product.factors(inp))
    if weights is not None:
        product.results[LEAST] = weights * bounds(weights.dtype)[0]
    return squares


@squared_norm.register
def squared_norm_lookup(product: LookupProduct) -> Tensor:
    """From the rows that were looked up; all others are zero."""
    return square_norm_of(product.segments()[0].flatten(2))


@squared_norm.register
def squared_norm_sum(product: SumProduct) -> Tensor:
    """``Σ_p ‖M_p‖² + 2 Σ_{p<q} ⟨M_p, M_q⟩`` over the parts: the sum is not formed."""
    if is_formed(product):
        return squared_norm(as_formed(product))
    total = reduce(torch.add, map(squared_norm, product.parts))
    for first, second in combinations(product.parts, 2):
        total = total + 2 * inner(first, second)
    known = [part.results[LEAST] for part in product.parts if LEAST in part.results]
    if known:
        product.results[LEAST] = len(product.parts) * reduce(torch.add, known)
    return total.clamp(min=0)


def inner(product: SampleProduct, other: SampleProduct) -> Tensor:
    """``⟨M[v, n], M'[v, n]⟩`` with another product of the same parameter. Shape ``[V, N]``."""
    for first, second in ((product, other), (other, product)):
        found = inner_version(first, second)
        if found is not None:
            return found
    result = product.new_zeros(product.columns, product.samples)
    for columns, samples, part in product.pieces():
        pairs = part * other.part(columns, samples)
        result[columns, samples] = pairs.unsqueeze(-1).flatten(2).sum(2)
    return result


@OpenFunction
def inner_version(product: SampleProduct, other: SampleProduct) -> Tensor | None:
    """Dispatch on the first form; its version asks whether it can be paired with the second."""
    return None


@inner_version.register
def inner_affine(product: AffineProduct, other: SampleProduct) -> Tensor | None:
    """From inner products of factors, for two affine products in the parameter's own order."""
    if not isinstance(other, AffineProduct) or product.sizes != other.sizes:
        return None
    if not (product.arrange is None and other.arrange is None):
        return None
    if product.inp is None or other.inp is None:
        return None
    return contractions.inner(product.out, product.inp, other.out, other.inp)


@inner_version.register
def inner_lookup(product: LookupProduct, other: SampleProduct) -> Tensor:
    """From those rows of the other product that this one looked up."""
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
