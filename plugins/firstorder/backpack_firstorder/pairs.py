"""Inner products of two sets of individual gradients of one parameter, ``[N, M]``.

The sets are never formed as a whole. Each pair of forms has its own method. If it has several, the
one with fewer multiply-adds is used, unless the caller chooses.

Where the positions of a gradient cancel, inner products of positions are much larger than their
sum, and rounding in them may hide it. On the host, in single precision, an estimate of the norms
shows this, and inner products are then computed in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, prod
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_firstorder.plain import plain_terms
from backpack_products.affine import AffineProduct
from backpack_products.contractions import (
    aligned_norms,
    is_empty,
    pieces,
    products,
    row_steps,
    slices,
)
from backpack_products.host_functions import HostFunction
from backpack_products.lookup import LookupProduct
from backpack_products.open_functions import OpenFunction
from backpack_products.product import DenseProduct, SampleProduct
from backpack_products.rows import Rows, cast
from backpack_products.tuning import CACHE, READ, memory_budget
from backpack_products.values import is_lost

# Fewer features at a time than these make products of matrices too small to be fast.
_FEATURES = 32
# With so many random directions on both sides, one norm in 10,000 seems 25 times too small.
_DIRECTIONS = 4


Pairing: TypeAlias = Literal["positions", "formed"]


def as_pairing(form: Any) -> Pairing | None:
    """Check an argument ``form`` and return it.

    Raises:
        UsageError: The form is unknown.
    """
    if form is not None and form not in get_args(Pairing):
        raise UsageError(
            f"form must be one of {get_args(Pairing)}, or None for the cheaper. Got {form!r}."
        )
    pairing: Pairing | None = form
    return pairing


def pairs(first: SampleProduct, second: SampleProduct, form: Pairing | None = None) -> Tensor:
    """``⟨M[0, n], M'[0, m]⟩`` of two products of one column, of one parameter. Shape ``[N, M]``.

    A sum has the inner products of all pairs of its terms, those of different forms included.

    Args:
        first: One product.
        second: The other.
        form: For terms with several ways: ``"positions"`` for inner products of factors,
            ``"formed"`` for gradients that are formed in parts; default: the cheaper one.
    """
    total = first.new_zeros(first.samples, second.samples)
    if not total.numel():
        return total
    others = plain_terms(second)
    for term in plain_terms(first):
        for other in others:
            total = total + _pairs_of_terms(term, other, form)
    return total


def _pairs_of_terms(first: SampleProduct, second: SampleProduct, form: Pairing | None) -> Tensor:
    version = pairs_version(first, second, form)
    if version is not None:
        return version
    version = pairs_version(second, first, form)
    return _by_pieces(first, second) if version is None else version.T


@OpenFunction
def pairs_version(
    first: SampleProduct, second: SampleProduct, form: Pairing | None
) -> Tensor | None:
    """Dispatch on the first form; its version asks whether it can be paired with the second."""
    return None


def _by_pieces(first: SampleProduct, second: SampleProduct) -> Tensor:
    """The inner products of formed gradients, some of both sets at a time."""
    total = first.new_zeros(first.samples, second.samples)
    single = max(1, prod(second.shape) * total.element_size())
    for some in slices(second.samples, memory_budget() // single):
        right = second.part(slice(0, 1), some).reshape(-1, prod(second.shape))
        for _, rows, piece in first.pieces():
            total[rows, some] = piece.reshape(-1, right.shape[1]) @ right.T
    return total


@pairs_version.register
def _pairs_dense(first: DenseProduct, second: SampleProduct, form: Pairing | None) -> Tensor | None:
    if first.values is None or not isinstance(second, DenseProduct) or second.values is None:
        return None
    left, right = first.values[0], second.values[0]
    return left.reshape(len(left), -1) @ right.reshape(len(right), -1).T


# Weights ------------------------------------------------------------------------------------------


@pairs_version.register
def _pairs_affine(
    first: AffineProduct, second: SampleProduct, form: Pairing | None
) -> Tensor | None:
    inp = first.inp
    if inp is None or first.arrange is not None:
        return None
    out, sizes = first.out, first.sizes
    if isinstance(second, DenseProduct) and second.values is not None:
        return affine_with_dense(out, inp, second.values.reshape(second.samples, *sizes), form)
    if isinstance(second, LookupProduct) and sizes == (1, *second.shape):
        return _affine_with_lookup(out, inp, second, form)
    if not isinstance(second, AffineProduct) or second.inp is None or second.arrange is not None:
        return None
    if is_empty(out, inp) or is_empty(second.out, second.inp):
        return out.new_zeros(first.samples, second.samples)
    if second.sizes != sizes:
        return None
    is_cheaper = _is_cheaper_by_positions(out, inp, second.out, second.inp)
    if form == "positions" or (is_cheaper and form is None):
        factors = out, inp, second.out, second.inp
        looks = first.positions * second.positions > 1  # else nothing cancels
        looks = looks and out.dtype is second.out.dtype is torch.float32
        looks = looks and pairs_by_positions.takes(*factors)
        return (pairs_by_positions if looks else _by_positions)(*factors)
    # The smaller set is formed again for each part of the larger one.
    other_out, other_inp = second.out, second.inp
    if first.samples * first.positions < second.samples * second.positions:
        return _by_features(other_out, other_inp, first.samples, _former(out, inp)).T
    return _by_features(out, inp, second.samples, _former(other_out, other_inp))


def _former(out: Tensor, inp: Rows) -> Callable[[slice], Tensor]:
    """Forms gradients of some output features. Shape ``[M, G, o, I]``."""
    return lambda some: products(out[..., some], inp)[0]


def _is_cheaper_by_positions(out: Tensor, inp: Rows, other: Tensor, other_inp: Rows) -> bool:
    """Whether inner products of positions cost less than products, in multiply-adds."""
    _, samples, positions, groups, features = out.shape
    size, (_, count, others) = inp.shape[3], other.shape[:3]
    met = samples * positions * count * others * groups * (features + size + READ)
    single = groups * features * size
    formed = samples * positions + count * others + samples * count + (samples + count) * READ
    return met < formed * single


@HostFunction
def pairs_by_positions(out: Tensor, inp: Rows, other_out: Tensor, other_inp: Rows) -> Tensor:
    """:func:`_by_positions`, in double precision if digits may be lost."""
    wide = torch.float64
    left, right = (_left_over(*factors).amin() for factors in ((out, inp), (other_out, other_inp)))
    if not is_lost(left * right, left.new_ones(()), out.dtype):
        return _by_positions(out, inp, other_out, other_inp)
    factors = out.to(wide), cast(inp, wide), other_out.to(wide), cast(other_inp, wide)
    return _by_positions(*factors).to(out.dtype)


def _left_over(out: Tensor, inp: Rows) -> Tensor:
    """About which share of a norm is left after positions cancel, ``[N]``; one for zeros."""
    samples, positions = out.shape[1:3]
    if positions == 1:
        return out.new_ones(samples)
    random = torch.Generator().manual_seed(0)
    sizes = out.shape[4], inp.shape[3]
    left, right = (
        torch.randn(size, _DIRECTIONS, generator=random, dtype=out.dtype) for size in sizes
    )
    found, most = [], aligned_norms(out, inp)[0]
    for rows in row_steps(inp, out.element_size()):
        met = _met_by_few(out[0, rows], left).mT @ _met_by_few(inp[rows], right)
        found.append(met.view(rows.stop - rows.start, -1).norm(dim=1))
    share = torch.cat(found) / _DIRECTIONS / most
    return torch.where(most > 0, share, 1.0)


def _met_by_few(factor: Tensor, directions: Tensor) -> Tensor:
    """Inner products of ``[n, S, G, I]`` with directions ``[I, K]``. Shape ``[n · G, S, K]``."""
    met = directions.T @ factor.reshape(-1, len(directions)).T  # faster than with few columns
    return met.view(-1, *factor.shape[:3]).permute(1, 3, 2, 0).flatten(0, 1)


def _by_positions(out: Tensor, inp: Rows, other_out: Tensor, other_inp: Rows) -> Tensor:
    """``Σ_g Σ_s Σ_t ⟨out[n, s], out'[m, t]⟩ ⟨inp[n, s], inp'[m, t]⟩``, in parts."""
    (_, samples, positions), (_, count, others) = out.shape[:3], other_out.shape[:3]
    total = out.new_zeros(samples, count)
    most = CACHE // out.element_size()
    some = max(1, min(count, isqrt(most) // others))
    few = max(1, most // (some * others * positions))
    for columns in slices(count, some):
        right_out, right_inp = other_out[0, columns], other_inp[columns]
        for rows in slices(samples, few):
            left_out, left_inp = out[0, rows], inp[rows]
            for group in range(out.shape[3]):
                met = _met(left_out, right_out, group) * _met(left_inp, right_inp, group)
                shape = (-1, positions, columns.stop - columns.start, others)
                total[rows, columns] += met.view(shape).sum((1, 3))
    return total


def _met(left: Tensor, right: Tensor, group: int) -> Tensor:
    """Inner products of all positions of two sets. Shape ``[n · S, m · T]``."""
    return left[:, :, group].flatten(0, 1) @ right[:, :, group].flatten(0, 1).T


def affine_with_dense(out: Tensor, inp: Rows, other: Tensor, form: Pairing | None = None) -> Tensor:
    """The inner products with formed gradients or directions ``[M, G, O, I]``."""
    count, positions = len(other), out.shape[2]
    if is_empty(out, inp) or not count:
        return out.new_zeros(out.shape[1], count)
    is_cheaper = count * positions <= positions + READ + count
    if form == "positions" or (is_cheaper and form is None):
        return _by_multiplying(out, inp, other)
    return _by_features(out, inp, count, lambda some: other[:, :, some])


def _by_multiplying(out: Tensor, inp: Rows, other: Tensor) -> Tensor:
    """``Σ_s outᵀ D inp``, as one product of matrices for each direction ``D``."""
    total = out.new_zeros(out.shape[1], len(other))
    for rows in row_steps(inp, out.element_size()):
        right, left = inp[rows], out[0, rows]
        for column, direction in enumerate(other):
            seen = torch.einsum("nsgo,goi->nsgi", left, direction)
            total[rows, column] = (seen * right).flatten(1).sum(1)
    return total


def _by_features(out: Tensor, inp: Rows, count: int, form: Callable[[slice], Tensor]) -> Tensor:
    """By gradients that are formed for some output features at a time.

    Args:
        out: Columns at the output, ``[1, N, S, G, O]``.
        inp: What the weight multiplies, ``[N, S, G, I]``.
        count: ``M``.
        form: The other gradients of some features, ``[M, G, o, I]``.
    """
    samples, _, groups, features = out.shape[1:]
    total = out.new_zeros(samples, count)
    single = groups * inp.shape[3] * out.element_size()
    step = max(CACHE // 2 // (count * single), min(features, _FEATURES))
    step = max(1, min(step, memory_budget() // (count * single)))
    for some in slices(features, step):
        right = form(some).reshape(count, -1).T
        for _, rows, piece in pieces(out[..., some], inp, CACHE // 2):  # [n, G, 1, o, I]
            total[rows] += piece.reshape(-1, len(right)) @ right
    return total


# Tables -------------------------------------------------------------------------------------------


def _affine_with_lookup(
    out: Tensor, inp: Rows, other: LookupProduct, form: Pairing | None
) -> Tensor:
    """By only those rows of the affine product that the table's samples looked up."""
    parts = [out.new_zeros(out.shape[1], 0)]
    for rows, table in tables(other):
        parts.append(affine_with_dense(out[..., rows], inp, table.unsqueeze(1), form))
    return torch.cat(parts, 1)


def tables(product: LookupProduct) -> list[tuple[Tensor, Tensor]]:
    """Tables of the rows that some samples look up: which rows ``[R]``, and ``[m, R, dim]``.

    Each table is for as many samples as fit into the memory budget.
    """
    single = max(1, product.row.shape[1] * product.shape[1] * product.like.element_size())
    filled = []
    for some in slices(product.samples, isqrt(memory_budget() // single)):
        rows, place = product.row[some].unique(return_inverse=True)
        shape = torch.Size((len(rows), product.shape[1]))
        small = LookupProduct(product.out[:, some], place, shape)
        filled.append((rows, small.part(slice(0, 1), slice(0, small.samples))[0]))
    return filled


@pairs_version.register
def _pairs_lookup(
    first: LookupProduct, second: SampleProduct, form: Pairing | None
) -> Tensor | None:
    if isinstance(second, DenseProduct) and second.values is not None:
        return _lookup_with_dense(first.out[0], first.row, second.values[0])
    if not isinstance(second, LookupProduct):
        return None
    if not second.row.numel():
        return first.new_zeros(first.samples, second.samples)
    parts = [first.new_zeros(first.samples, 0)]
    for rows, table in tables(second):
        place = torch.searchsorted(rows, first.row.contiguous()).clamp(max=len(rows) - 1)
        is_there = (rows[place] == first.row).unsqueeze(-1)
        out = torch.where(is_there, first.out[0], 0)
        parts.append(_lookup_with_dense(out, place, table))
    return torch.cat(parts, 1)


def _lookup_with_dense(out: Tensor, row: Tensor, other: Tensor) -> Tensor:
    """``Σ_k ⟨out[n, k], D[m, row[n, k]]⟩`` with ``D`` ``[M, num, dim]``. Shape ``[N, M]``."""
    samples, count, dim = out.shape
    total = out.new_zeros(samples, len(other))
    if not count:
        return total
    few = CACHE // max(1, count * len(other) * dim * out.element_size())
    for some in slices(samples, few):
        seen = other[:, row[some].flatten()].transpose(0, 1)  # [n · K, M, dim]
        products = torch.bmm(seen, out[some].reshape(-1, dim, 1))
        total[some] = products.view(-1, count, len(other)).sum(1)
    return total
