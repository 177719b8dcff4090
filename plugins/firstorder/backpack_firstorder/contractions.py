"""Sums, squares and norms of individual gradients, from the factors of an affine product.

Pure functions with the axis letters of ``backpack_products.contractions``. For
``M[v, n] = Σ_s out[v, n, s] ⊗ inp[n, s]`` each returns a reduction of ``M``; ``moments`` returns
several, from one formation of ``M``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from backpack_firstorder.one_column import NOTHING, Moments, moments_of_column
from backpack_firstorder.scaled import (
    Norm,
    collected,
    divisor,
    largest,
    may_look,
    unless_cancelled,
    vector_norm,
)
from backpack_products.contractions import (
    add,
    add_squares,
    aligned_norms,
    form,
    is_column,
    is_empty,
    pieces,
    products,
    row_steps,
    slices,
    square_sum,
    sums,
)
from backpack_products.host_functions import HostFunction
from backpack_products.multiply import multiply_each
from backpack_products.recycled import take
from backpack_products.rows import DirectRows, Rows, whole
from backpack_products.tuning import BAND, CACHE, READ, SHARED
from backpack_products.values import is_lost

# A square must exceed the rounding error by this factor, so that six digits are right.
_DIGITS = 1e6


def moments(
    out: Tensor, inp: Rows, sum_: bool = True, square: bool = True, norm_: bool = False
) -> Moments:
    """``Σ_n M[n]``, ``Σ_n M[n]²`` and ``‖M[n]‖``, from one formation of ``M`` in pieces."""
    if out.shape[2] == 1 or torch.is_grad_enabled() or is_empty(out, inp):
        return Moments(
            sums(out, inp) if sum_ else None,
            square_sum(out, inp) if square else None,
            norm(out, inp) if norm_ else None,
        )
    if is_column(inp, out):
        return moments_of_column(out, inp, sum_, square, norm_)
    total = out.new_zeros(len(out), *out.shape[3:], inp.shape[3]) if sum_ else None
    squares = out.new_zeros(*out.shape[3:], inp.shape[3]) if square else None
    norms: list[tuple[int, slice, Norm]] = []
    for some, rows, piece in pieces(out, inp, SHARED):  # autograd holds memory, too
        for column, part in zip(range(some.start, some.stop), piece.unbind(2), strict=True):
            flat = part.reshape(len(part), -1)  # [n, G·O·I]
            if norm_:
                norms.append((column, rows, vector_norm(flat, 1)))
            if total is not None:
                add(total[column], flat)
            if squares is not None:
                add_squares(squares, flat)
    zeros = out.new_zeros(out.shape[:2]) if norm_ else None
    return Moments(total, squares, None if zeros is None else collected(zeros, norms))


def products_with(
    out: Tensor, inp: Rows, sum_: bool, square: bool, norm_: bool
) -> tuple[Tensor, Moments]:
    """``M``, and those of its moments that are cheap while a piece of it is in the cache.

    These are all moments for one column without groups, else the sum. There are none if positions
    are not shared, or if autograd records.
    """
    columns, samples, positions, *sizes = out.shape
    is_cheap = positions > 1 and not torch.is_grad_enabled() and not is_empty(out, inp)
    if not is_cheap or not (sum_ or (is_column(inp, out) and (square or norm_))):
        return products(out, inp), NOTHING
    shape = columns, samples, *sizes, inp.shape[3]
    result = take(out, shape)
    result = out.new_empty(shape) if result is None else result
    if is_column(inp, out):
        return result, moments_of_column(out, inp, sum_, square, norm_, result)
    total = out.new_zeros(columns, *sizes, inp.shape[3])
    for target, column, rows in form(out, inp, result):
        add(total[column], target[rows])
    return result, Moments(total, None, None)


def norm(out: Tensor, inp: Rows, left: Norm | None = None) -> Norm:
    """``‖M[v, n]‖``, by Gram matrices over positions if they are cheaper. Shape ``[V, N]``.

    Not finite where an entry of a factor is not finite.

    Args:
        out: Columns at the output.
        inp: What the weight multiplies.
        left: The norms of the columns by group, ``[V, N, G]``, if they are known.
    """
    if is_empty(out, inp):
        return Norm(out.new_zeros(out.shape[:2]))
    if out.shape[2] == 1:
        left = vector_norm(out.squeeze(2), 3) if left is None else left
        return left.times(vector_norm(whole(inp).squeeze(1), 2)).total(2)
    if is_gram_cheaper(out, inp):
        return norm_by_gram(out, inp)
    if torch.is_grad_enabled():  # autograd's graph keeps all pieces anyway
        return vector_norm(products(out, inp), 2)
    norms = moments(out, inp, sum_=False, square=False, norm_=True).norms
    assert norms is not None
    return norms


def is_gram_cheaper(out: Tensor, inp: Rows, is_summed: bool = False) -> bool:
    """Whether norms cost less by Gram matrices over positions than from products.

    Args:
        out: Columns at the output.
        inp: What the weight multiplies.
        is_summed: Whether the sum over samples is needed, too; formed products give it at the
            cost of one more read.
    """
    columns, _, positions, _, features = out.shape
    single = columns * features * inp.shape[3]
    gram = gram_count(positions, features, inp.shape[3], columns)
    if is_summed:
        gram += positions * single
    return gram < (positions + READ * (1 + is_summed)) * single


def gram_count(positions: float, features: int, size: int, columns: int = 1) -> float:
    """The cost of :func:`norm_by_gram` for one sample, in multiply-adds.

    If values cannot be read, scaling adds three readings of the factors.
    """
    read = READ * positions * (columns * features + size)
    return positions**2 * (columns * (features + READ) + size) + read


def inner(out: Tensor, inp: Rows, other_out: Tensor, other_inp: Rows) -> Tensor:
    """``Σ_s Σ_t ⟨out_s, out'_t⟩ ⟨inp_s, inp'_t⟩`` of two products of one form. Shape ``[V, N]``."""
    if is_empty(out, inp) or is_empty(other_out, other_inp):
        return out.new_zeros(out.shape[:2])
    parts = []
    for rows in row_steps(inp, out.element_size()):
        left = _by_group(inp[rows])
        right = left if other_inp is inp else _by_group(other_inp[rows])
        seen = multiply_each(left, right.mT)  # [n·G, S, T]
        norms = []
        for column, other in zip(out[:, rows], other_out[:, rows], strict=True):
            pairs = multiply_each(_by_group(column), _by_group(other).mT)
            pairs = pairs * seen if torch.is_grad_enabled() else pairs.mul_(seen)
            norms.append(pairs.view(len(column), -1).sum(1))
        parts.append(torch.stack(norms))
    return torch.cat(parts, 1)


def norm_by_gram(out: Tensor, inp: Rows) -> Norm:
    """:func:`norm` from inner products of a product with itself.

    Inner products overflow and underflow long before the norm does. So the inputs of each position
    and group are divided by their largest entry; columns are multiplied by it, and then divided by
    their own largest entry. Factors of different positions may thus differ by any magnitude. On the
    host, nothing is divided if a check shows that no digits were lost.

    Positions may cancel, and rounding in the inner products is then larger than what is left. On
    the host, a check shows this, and products are formed. Elsewhere, norms are at least what
    rounding may hide, so they are not too small.
    """
    if may_look(squares_by_gram, out, inp):
        return Norm(squares_by_gram(out, inp))
    squares, most, scale = _scaled_squares(out, inp)
    return Norm(unless_cancelled(squares, most, out.dtype), scale).wide()


def _scaled_squares(out: Tensor, inp: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Squares of norms, those of positions with one direction, and the scale of both roots."""
    squares, bounds, scales, few = [], [], [], 4 * torch.finfo(out.dtype).tiny
    for rows in row_steps(inp, out.element_size()):
        right = _by_group(inp[rows])
        most = largest(right, 2)  # [n·G, S]
        seen = _gram(right / divisor(most).unsqueeze(2))
        found, together, peaks = [], [], []
        for column in out[:, rows]:
            count, left = len(column), _by_group(column)
            highest = largest(left, 2)
            # The divisor is large enough for the contribution of any position that has columns.
            peak = torch.maximum(highest * most, few * most * (highest > 0))
            peak = divisor(peak.view(count, -1).amax(1))  # [n]
            share = most.view(count, -1) / peak.unsqueeze(1)
            pairs = _gram(left * divisor(share).view_as(most).unsqueeze(2))
            together.append(_aligned(pairs, seen, count))
            found.append(_met(pairs, seen).view(count, -1).sum(1))
            peaks.append(peak)
        squares.append(torch.stack(found))
        bounds.append(torch.stack(together))
        scales.append(torch.stack(peaks))
    return torch.cat(squares, 1), torch.cat(bounds, 1), torch.cat(scales, 1)


@HostFunction
def squares_by_gram(out: Tensor, inp: Rows) -> Tensor:
    """Squared norms from Gram matrices of unscaled factors, unless digits may be lost."""
    squares, lost, most = (out.new_empty(out.shape[:2]) for _ in range(3))
    for rows, seen in _grams(inp, out.element_size()):
        highest = _peak(seen)
        for number, column in enumerate(out[:, rows]):
            left, count = _by_group(column), len(column)
            pairs = _gram(left)
            peak = _peak(pairs)
            # A product of entries may be off by the smallest number, times the other inner product.
            sizes = highest * left.shape[2] + peak * inp.shape[3] + 1
            lost[number, rows] = sizes.view(count, -1).sum(1)
            most[number, rows] = peak.mul_(highest).view(count, -1).sum(1)
            squares[number, rows] = _met(pairs, seen).view(count, -1).sum(1)
    limit, positions = torch.finfo(out.dtype), out.shape[2] ** 2
    least = lost.mul_(_DIGITS * limit.tiny * positions)
    is_kept = bool(((squares > least) & (squares < limit.max)).all())
    if is_kept and not is_lost(squares, most, out.dtype, positions):
        return squares.double()
    if is_kept:
        result, most = squares.double(), aligned_norms(out, inp).square()
    else:
        squares, most, scale = _scaled_squares(out, inp)
        result = squares.double() * scale.double().square()
    if is_lost(squares, most, out.dtype):
        formed = moments(out, inp, sum_=False, square=False, norm_=True).norms
        assert formed is not None
        return formed.squares
    return result


def _grams(inp: Rows, itemsize: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """:func:`_gram` of inputs, for some samples at a time."""
    direct = inp if isinstance(inp, DirectRows) and not torch.is_grad_enabled() else None
    size = 0 if direct is None else direct.gram_size()
    if direct is None or not size:
        yield from ((rows, _gram(_by_group(inp[rows]))) for rows in row_steps(inp, itemsize))
        return
    for rows in slices(inp.shape[0], CACHE // (size * itemsize)):
        whole = direct.gram(rows)
        yield rows, [whole[:, band, band.start :] for band in _bands(whole.shape[1])]


def _gram(mat: Tensor) -> list[Tensor]:
    """Inner products of the positions of ``[n, S, I]``: bands on and above the diagonal.

    A band is ``[n, b, S - start]``: of ``b`` positions with themselves and all later ones.
    """
    bands = _bands(mat.shape[1])
    return [multiply_each(mat[:, band], mat[:, band.start :].mT) for band in bands]


def _bands(positions: int) -> Iterator[slice]:
    step = positions if positions < 2 * BAND else max(BAND, -(-positions // 4))
    return slices(positions, step)


def _met(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """``Σ_s Σ_t A[s, t] B[s, t]`` of two results of :func:`_gram`; the first is overwritten."""
    total: Tensor | None = None
    for mine, its in zip(first, second, strict=True):
        both = mine * its if torch.is_grad_enabled() else mine.mul_(its)
        found = both.flatten(1).sum(1)
        if both.shape[2] > both.shape[1]:  # what is behind counts for both orders
            found = found + both[:, :, both.shape[1] :].sum((1, 2))
        total = found if total is None else total + found
    assert total is not None
    return total


@torch.no_grad()
def _aligned(first: list[Tensor], second: list[Tensor], samples: int) -> Tensor:
    """What :func:`_met` gives if all positions have one direction, added up over groups, ``[n]``.

    The rounding error of :func:`_met` is a share of this.
    """
    own = [
        mine.diagonal(dim1=1, dim2=2) * its.diagonal(dim1=1, dim2=2)
        for mine, its in zip(first, second, strict=True)
    ]
    return torch.cat(own, 1).sqrt().sum(1).square().view(samples, -1).sum(1)


def _peak(gram: list[Tensor]) -> Tensor:
    """The largest inner product of a position with itself."""
    peaks = [band.diagonal(dim1=1, dim2=2).amax(1) for band in gram]
    return reduce(torch.maximum, peaks)


def _by_group(mat: Tensor) -> Tensor:
    """``[n, S, G, I] → [n·G, S, I]``, a view for the usual layouts."""
    return mat.transpose(1, 2).flatten(0, 1)
