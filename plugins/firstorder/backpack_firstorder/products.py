"""Versions of the core's operations for norms and moments of individual gradients.

If several of sum, sum of squares, and norms are needed of one affine product, they are computed
from one formation of it. The norm of a sum of products comes from inner products of its parts.
Norms may have any size, see ``scaled.py``; squared norms are made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from backpack_firstorder import contractions
from backpack_firstorder.scaled import (
    Norm,
    collected,
    divisor,
    spread,
    stacked,
    unless_cancelled,
    vector_norm,
)
from backpack_products.affine import AffineProduct, for_weights, reads_formed
from backpack_products.contractions import is_column
from backpack_products.factors import FactorProduct
from backpack_products.host_functions import HostFunction
from backpack_products.lookup import LookupProduct
from backpack_products.open_functions import OpenFunction, Operation
from backpack_products.operations import (
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
from backpack_products.owned import OwnedAffine
from backpack_products.product import DenseProduct, SampleProduct, SumProduct
from backpack_products.rows import Rows
from backpack_products.scale import ScaleProduct
from backpack_products.tuning import READ, SUMMED
from backpack_products.values import above_rounding


@Operation
def norm(product: SampleProduct) -> Norm:
    """``‖M[v, n]‖``, even if the square is out of range. Shape ``[V, N]``."""
    pieces = as_formed(product).pieces() if is_formed(product) else product.pieces()
    zeros = product.new_zeros(product.columns, product.samples)
    return collected(zeros, ((v, n, vector_norm(part, 2)) for v, n, part in pieces))


def _of_pieces(product: AffineProduct, inp: Rows) -> tuple[bool, bool, bool]:
    """Which of sum, squares and norms to read from pieces of ``M``; never only the sum."""
    needs = product.needs
    square = square_sum in needs and per_sample_square_sum not in needs
    norms = squared_norm in needs and product.positions > 1
    if norms and not square:  # for squares, the pieces are formed anyway
        norms = not contractions.is_gram_cheaper(*product.factors(inp), batch_sum in needs)
    return batch_sum in needs and (square or norms), square, norms


@read_together.register
def read_together_affine(product: AffineProduct) -> Mapping[Any, Any]:
    """For a weight that positions share: everything that is needed, from the same pieces."""
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
    return result if norms is None else {**result, norm: norms}


@formed.register
def formed_affine(product: AffineProduct) -> Tensor:
    """With the moments that are needed and come cheaply; see :func:`contractions.products_with`."""
    if product.inp is None or product.out.shape[2] == 1:
        return product.whole()
    wanted = [operation in product.needs for operation in (batch_sum, square_sum, squared_norm)]
    whole, (*along, norms) = contractions.products_with(*product.factors(product.inp), *wanted)
    for operation, mat in zip((batch_sum, square_sum), along, strict=True):
        if mat is not None:
            product.results[(operation,)] = product.to_parameter(mat)
    if norms is not None:
        product.results[(norm,)] = norms
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


@norm.register
def norm_affine(product: AffineProduct) -> Norm:
    """By :func:`contractions.norm`, or along with what else is needed."""
    inp = product.inp
    of_columns = None if inp is not None else product.shared(_norms, product.out)
    if of_columns is not None and not is_formed(product):
        return of_columns.total(2)
    along: Norm | None = None
    if inp is None or reads_formed(product):
        formed, along = as_formed(product), product.results.get((norm,))
        return norm(formed) if along is None else along
    if squared_norm in product.needs:
        together: Mapping[Any, Any] = read_together(product)
        along = together.get(norm)
    if along is not None:
        return along
    out, rows = product.factors(inp)
    return contractions.norm(out, rows, product.shared(_norms, out))


def _norms(out: Tensor) -> Norm:
    """Norms for a single position, by group. Shape ``[V, N, G]``."""
    return vector_norm(out.squeeze(2), 3)


@norm.register
def norm_owned(product: OwnedAffine) -> Norm:
    """Norms by samples with equally many rows; from formed products if inputs are made again."""
    rows = product.of_rows
    if product.is_small:
        return norm_affine(product)
    if is_formed(product) or rows.inp is None or not is_of_shares(product, rows.inp):
        return norm.definition(product)
    zeros, every = product.new_zeros(product.columns, product.samples), slice(0, product.columns)
    return collected(zeros, ((every, its, norm(share)) for its, share in product.shares()))


def is_of_shares(product: OwnedAffine, inp: Rows) -> bool:
    """Whether inputs exist, or are worth making for Gram matrices."""
    if isinstance(inp, Tensor):
        return True
    features, size = product.of_rows.out.shape[4], inp.shape[3]
    share = inp.shape[0] / max(1, product.samples)
    positions, adding = share * product.of_rows.positions, share * READ
    count = contractions.gram_count(positions, features, size)
    return count < (positions + adding) * features * size


@norm.register
def norm_lookup(product: LookupProduct) -> Norm:
    """From the rows that were looked up; all others are zero."""
    return vector_norm(product.segments()[0], 2)


@norm.register
def norm_sum(product: SumProduct) -> Norm:
    """``√(Σ_p ‖M_p‖² + 2 Σ_{p<q} ⟨M_p, M_q⟩)`` over the parts: the sum is not formed.

    Parts are divided by the norm of the largest, so that inner products are no larger than one.
    Where parts nearly cancel, rounding hides what is left. On the host, a check shows this, and the
    sum is formed for these samples. Elsewhere, norms are at least what rounding may hide.
    """
    if is_formed(product):
        return norm(as_formed(product))
    each = stacked([norm(part) for part in product.parts])  # [P, V, N]
    scale = divisor(each.value().detach().amax(0).to(product.like.dtype))
    parts = [_divided(part, scale) for part in product.parts]
    share = 1 / scale.to(each.squares.dtype)
    own = Norm(each.squares, share if each.scale is None else each.scale * share)
    total, most = own.squared().sum(0), own.value().sum(0).square()
    for first, second in combinations(parts, 2):
        total = total + 2 * inner(first, second)
    if with_formed.takes(total, most, scale, product):
        total = with_formed(total, most, scale, product)
    else:
        total = unless_cancelled(total, most, product.like.dtype)
    norms = Norm(total, scale.to(total.dtype))
    return norms if each.scale is not None else Norm(norms.squared())


@HostFunction
def with_formed(squares: Tensor, most: Tensor, scale: Tensor, product: SampleProduct) -> Tensor:
    """Squares in units of ``scale²``; from the formed product if rounding may hide what is left.

    ``most`` has the squares if all parts had one direction.
    """
    is_lost = ~(above_rounding(squares, most, product.like.dtype) >= 0)
    if not bool(is_lost.any()):
        return squares
    squares = squares.clone()
    for sample in is_lost.any(0).nonzero().flatten().tolist():
        some = slice(sample, sample + 1)
        formed = product.part(slice(0, product.columns), some)
        squares[:, some] = vector_norm(formed / spread(scale[:, some], formed.dim()), 2).squared()
    return squares


def _divided(product: SampleProduct, scale: Tensor) -> SampleProduct:
    """The product, divided by numbers ``[V, N]``; in factors if it has some."""
    if isinstance(product, FactorProduct):
        out = product.out / spread(scale, product.out.dim())
        return product.with_factors(out, product.other, product.is_own)

    def form(columns: slice, samples: slice) -> Tensor:
        part = product.part(columns, samples)
        return part / spread(scale[columns, samples], part.dim())

    mat = product.new_zeros(1).expand(product.columns, product.samples)
    return DenseProduct(form=form, mat=mat, shape=product.shape)


@for_weights(squared_norm)
def squared_norm_affine(product: AffineProduct, inp: Rows) -> Tensor:
    """From the norm, which neither overflows nor underflows."""
    return _squared(product)


@squared_norm.register
def squared_norm_of_parts(product: LookupProduct | OwnedAffine | SumProduct) -> Tensor:
    """From the norm, which neither overflows nor underflows."""
    return _squared(product)


def _squared(product: SampleProduct) -> Tensor:
    return norm(product).squared().to(product.like.dtype)


def inner(product: SampleProduct, other: SampleProduct) -> Tensor:
    """``⟨M[v, n], M'[v, n]⟩`` with another product of the same parameter. Shape ``[V, N]``."""
    for first, second in ((product, other), (other, product)):
        products = inner_version(first, second)
        if products is not None:
            return products
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
