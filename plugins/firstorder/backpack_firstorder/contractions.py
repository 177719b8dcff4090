"""Sums, squares and norms of individual gradients, from the factors of an affine product.

Pure functions with the axis letters of ``backpack_core.contract.contractions``. For
``M[v, n] = Σ_s out[v, n, s] ⊗ inp[n, s]`` each returns a reduction of ``M``; ``moments`` returns
several, from one formation of ``M``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.contract.contractions import (
    add,
    add_squares,
    is_empty,
    pieces,
    products,
    row_steps,
    square_norm_of,
    square_sum,
    sums,
)
from backpack_core.contract.moments import Moments, is_column, moments_of_column
from backpack_core.contract.rows import Rows
from backpack_core.tuning import READ, SHARED


def moments(
    out: Tensor, inp: Rows, sum_: bool = True, square: bool = True, norm: bool = False
) -> Moments:
    """``Σ_n M[n]``, ``Σ_n M[n]²`` and ``‖M[n]‖²``, from one formation of ``M`` in pieces."""
    if out.shape[2] == 1 or torch.is_grad_enabled() or is_empty(out, inp):
        return Moments(
            sums(out, inp) if sum_ else None,
            square_sum(out, inp) if square else None,
            squared_norm(out, inp) if norm else None,
        )
    if is_column(inp, out):
        return moments_of_column(out, inp, sum_, square, norm)
    total = out.new_zeros(len(out), *out.shape[3:], inp.shape[3]) if sum_ else None
    squares = out.new_zeros(*out.shape[3:], inp.shape[3]) if square else None
    norms = out.new_empty(out.shape[:2]) if norm else None
    for some, rows, piece in pieces(out, inp, SHARED):  # autograd holds memory, too
        for column, part in zip(range(some.start, some.stop), piece.unbind(2), strict=True):
            flat = part.reshape(len(part), -1)  # [n, G·O·I]
            if norms is not None:
                torch.linalg.vector_norm(flat, dim=1, out=norms[column, rows])
            if total is not None:
                add(total[column], flat)
            if squares is not None:
                add_squares(squares, flat)
    return Moments(total, squares, None if norms is None else norms.square_())


def squared_norm(out: Tensor, inp: Rows) -> Tensor:
    """``‖M[v, n]‖²``, by Gram matrices over positions where they are cheaper. Shape ``[V, N]``."""
    if is_empty(out, inp):
        return out.new_zeros(out.shape[:2])
    if out.shape[2] == 1:
        return by_group(*squares_of_factors(out, inp))
    if is_gram_cheaper(out, inp):
        return inner(out, inp, out, inp).clamp(min=0)  # may round below 0
    if torch.is_grad_enabled():  # the graph holds all pieces anyway
        return products(out, inp).flatten(2).square().sum(2)
    norms = moments(out, inp, sum_=False, square=False, norm=True).norms
    assert norms is not None
    return norms


def squares_of_factors(out: Tensor, inp: Rows) -> tuple[Tensor, Tensor]:
    """``‖out[v, n, g]‖²``, ``[V, N, G]``, and ``‖inp[n, g]‖²``, ``[N, G]``, for one position."""
    return square_norm_of(out.squeeze(2)), square_norm_of(inp[:].squeeze(1))


def by_group(left: Tensor, right: Tensor) -> Tensor:
    """``‖M[v, n]‖²`` from squares of factors. Shape ``[V, N]``."""
    squares = left * right
    return squares.squeeze(2) if squares.shape[2] == 1 else squares.sum(2)


def is_gram_cheaper(out: Tensor, inp: Rows, is_summed: bool = False) -> bool:
    """Whether norms cost less by Gram matrices over positions than from products.

    Args:
        out: Columns at the output.
        inp: What the weight multiplies.
        is_summed: Whether the sum over samples is needed, too; formed products give it for one
            more read.
    """
    columns, _, positions, _, features = out.shape
    single = columns * features * inp.shape[3]
    gram = positions**2 * (columns * (features + READ) + inp.shape[3])
    if is_summed:
        gram += positions * single
    return gram < (positions + READ * (1 + is_summed)) * single


def inner(out: Tensor, inp: Rows, other_out: Tensor, other_inp: Rows) -> Tensor:
    """``Σ_s Σ_t ⟨out_s, out'_t⟩ ⟨inp_s, inp'_t⟩`` of two products of one form. Shape ``[V, N]``."""
    if is_empty(out, inp) or is_empty(other_out, other_inp):
        return out.new_zeros(out.shape[:2])
    parts = []
    for rows in row_steps(inp, out.element_size()):
        left = _by_group(inp[rows])
        right = left if other_inp is inp else _by_group(other_inp[rows])
        seen = torch.bmm(left, right.mT)  # [n·G, S, T]
        norms = []
        for column, other in zip(out[:, rows], other_out[:, rows], strict=True):
            pairs = torch.bmm(_by_group(column), _by_group(other).mT)
            pairs = pairs * seen if torch.is_grad_enabled() else pairs.mul_(seen)
            norms.append(pairs.view(len(column), -1).sum(1))
        parts.append(torch.stack(norms))
    return torch.cat(parts, 1)


def _by_group(mat: Tensor) -> Tensor:
    """``[n, S, G, I] → [n·G, S, I]``, a view for the usual layouts."""
    return mat.transpose(1, 2).flatten(0, 1)
