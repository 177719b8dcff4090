"""Contractions of layers in weight-sharing form ``y[n, s, g] = W[g] x[n, s, g]``. Imports budget.

Pure functions of ``out`` (columns at the output, ``[V, N, S, G, O]``) and ``inp`` (what the weight
multiplies, ``[N, S, G, I]``). With ``M[v, n] = Σ_s out[v, n, s] ⊗ inp[n, s]``, of shape
``[V, N, G, O, I]``, each returns a reduction of ``M``, formed piece by piece or not at all.

A first write to fresh memory takes as long as many multiply-adds. Pieces fit into the cache and
share a buffer, and patches are made for some samples at a time: ``docs/design/contractions.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TypeGuard

import torch
from torch import Tensor

from backpack_core.contract.moments import NOTHING, Moments, is_column, moments_of_column
from backpack_core.contract.rows import DirectRows, Rows
from backpack_core.tuning import CACHE, DIRECT, LARGE, READ, SHARED, even_size, memory_budget


def products(out: Tensor, inp: Rows) -> Tensor:
    """``M`` itself. Shape ``[V, N, G, O, I]``."""
    return products_with(out, inp, False, False, False)[0]


def products_with(
    out: Tensor, inp: Rows, sum_: bool, square: bool, norm: bool
) -> tuple[Tensor, Moments]:
    """``M``, and moments of it that cost less while pieces of it are in the cache.

    Of one column without groups all of them, else the sum; none where positions are not shared, or
    autograd records.
    """
    columns, samples, positions, groups, features = out.shape
    size = inp.shape[3]
    if is_empty(out, inp):
        return out.new_zeros(columns, samples, groups, features, size), NOTHING
    if positions == 1:
        return out.permute(0, 1, 3, 4, 2) * inp[:].transpose(1, 2), NOTHING
    if torch.is_grad_enabled():
        whole = torch.stack([_batched(piece[None]) @ _right(inp[:]) for piece in out])
        return whole.reshape(columns, samples, groups, features, size), NOTHING
    result = out.new_empty(columns, samples, groups, features, size)
    if is_column(inp, out):
        return result, moments_of_column(out, inp, sum_, square, norm, result)
    total = out.new_zeros(columns, groups, features, size) if sum_ else None
    for target, column, rows in _formed(out, inp, result):
        if total is not None:
            add(total[column], target[rows])
    return result, Moments(total, None, None)


def _formed(out: Tensor, inp: Rows, result: Tensor) -> Iterator[tuple[Tensor, int, slice]]:
    """Form ``M`` in a result; yields a column of it, which one, and the samples just written."""
    features, size = result.shape[3:]
    if len(out) == 1 and _is_direct(inp, 1, out):
        for _, rows, piece in pieces(out, inp):
            result[0, rows] = piece.squeeze(2)
            yield result[0], 0, rows
        return
    for rows in row_steps(inp, out.element_size()):
        right = _right(inp[rows])
        for column, (piece, target) in enumerate(zip(out[:, rows], result, strict=True)):
            torch.bmm(_batched(piece[None]), right, out=target[rows].view(-1, features, size))
            yield target, column, rows


def square_sum(out: Tensor, inp: Rows) -> Tensor:
    """``Σ_v Σ_n M²``. Shape ``[G, O, I]``."""
    if out.shape[2] == 1 and not is_empty(out, inp):
        left = _sum_of_squares(out).squeeze(1)  # [N, G, O]
        right = inp[:].square().squeeze(1)  # [N, G, I]
        return torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1))
    if is_column(inp, out) and not is_empty(out, inp):
        squares = moments_of_column(out, inp, False, True, False).squares
        assert squares is not None
        return squares
    result = out.new_zeros(*out.shape[3:], inp.shape[3])
    for _, _, piece in pieces(out, inp):
        result = add_squares(result, piece.transpose(1, 2).flatten(0, 1))
    return result


def moments(
    out: Tensor, inp: Rows, sum_: bool = True, square: bool = True, norm: bool = False
) -> Moments:
    """Sum over samples, that of squares, and squared norms, all from the same pieces."""
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
    for some, rows, piece in pieces(out, inp, SHARED):  # on top of all that autograd holds
        for column, part in zip(range(some.start, some.stop), piece.unbind(2), strict=True):
            flat = part.reshape(len(part), -1)  # [n, G·O·I]
            if norms is not None:
                torch.linalg.vector_norm(flat, dim=1, out=norms[column, rows])
            if total is not None:
                add(total[column], flat)
            if squares is not None:
                add_squares(squares, flat)
    return Moments(total, squares, None if norms is None else norms.square_())


def per_sample_square_sum(out: Tensor, inp: Rows) -> Tensor:
    """``Σ_v M²``. Shape ``[N, G, O, I]``."""
    columns, samples, positions, groups, features = out.shape
    if is_empty(out, inp):
        return out.new_zeros(samples, groups, features, inp.shape[3])
    if positions == 1:
        left = _sum_of_squares(out).squeeze(1)
        return left.unsqueeze(-1) * inp[:].square().squeeze(1).unsqueeze(-2)
    if columns == 1 or torch.is_grad_enabled():
        return _squared(products(out, inp)).sum(0)
    result = out.new_zeros(samples, groups, features, inp.shape[3])
    for _, rows, piece in pieces(out, inp):
        for target, sample in zip(result[rows], piece, strict=True):
            add_squares(target, sample.transpose(0, 1))
    return result


def add(total: Tensor, rows: Tensor) -> Tensor:
    """Add ``Σ_k rows[k]`` in place, for ``rows`` ``[K, *]``."""
    # A product with ones reads each row once, and the total once for all of them.
    ones = rows.new_ones(len(rows))
    total.view(-1).addmv_(rows.reshape(len(rows), total.numel()).T, ones)
    return total


def add_squares(total: Tensor, rows: Tensor) -> Tensor:
    """``total + Σ_k rows[k]²`` for ``rows`` ``[K, *]``; in place unless autograd records."""
    if torch.is_grad_enabled():
        return total + rows.square().sum(0)
    if total.numel() < LARGE:
        return add(total, rows.square())
    flat = total.view(-1)
    for row in rows.reshape(len(rows), -1):
        flat.addcmul_(row, row)
    return total


def squared_norm(out: Tensor, inp: Rows) -> Tensor:
    """``‖M[v, n]‖²``, by Gram matrices over positions where they are cheaper. Shape ``[V, N]``."""
    if is_empty(out, inp):
        return out.new_zeros(out.shape[:2])
    if out.shape[2] == 1:
        left = out.square().sum(-1).squeeze(2)
        return (left * inp[:].square().sum(-1).squeeze(1)).sum(-1)
    if is_gram_cheaper(out, inp):
        return _squared_norm_by_gram(out, inp)
    if torch.is_grad_enabled():  # whose graph has all pieces anyway
        return products(out, inp).flatten(2).square().sum(2)
    norms = moments(out, inp, sum_=False, square=False, norm=True).norms
    assert norms is not None
    return norms


def is_gram_cheaper(out: Tensor, inp: Rows, is_summed: bool = False) -> bool:
    """Whether norms cost less by Gram matrices over positions than from products.

    Args:
        out: Columns at the output.
        inp: What the weight multiplies.
        is_summed: The sum over samples is needed, too: products have it for one more reading.
    """
    columns, _, positions, _, features = out.shape
    single = columns * features * inp.shape[3]
    gram = positions**2 * (columns * (features + READ) + inp.shape[3])
    if is_summed:
        gram += positions * single
    return gram < (positions + READ * (1 + is_summed)) * single


def sums(out: Tensor, inp: Rows) -> Tensor:
    """``Σ_n M``, at the price of a plain gradient for each column. Shape ``[V, G, O, I]``."""
    columns, _, _, groups, features = out.shape
    size = inp.shape[3]
    if is_empty(out, inp):
        return out.new_zeros(columns, groups, features, size)
    if columns == groups == 1 and isinstance(inp, Tensor):
        return (out.reshape(-1, features).T @ inp.reshape(-1, size)).view(1, 1, features, size)
    total: Tensor | None = None
    if isinstance(inp, DirectRows) and not torch.is_grad_enabled():
        total = inp.total(out)
        if total is not None:
            return total
    for rows in row_steps(inp, out.element_size()):
        left = out[:, rows].permute(3, 0, 4, 1, 2).reshape(groups, columns * features, -1)
        right = inp[rows].permute(2, 0, 1, 3).reshape(groups, -1, size)
        total = torch.bmm(left, right) if total is None else torch.baddbmm(total, left, right)
    assert total is not None
    return total.reshape(groups, columns, features, size).transpose(0, 1)


def pieces(out: Tensor, inp: Rows, limit: int = CACHE) -> Iterator[tuple[slice, slice, Tensor]]:
    """``M`` for some columns of some samples at a time, in one buffer: use a piece before the next.

    All columns of a sample are one matrix product, ``[V·O, S] @ [S, I]``. A piece has at most
    ``limit`` bytes, or one product.

    Yields:
        ``(columns, samples, piece)`` with a piece ``[n, G, v, O, I]``, samples outermost.
    """
    columns, samples, _, groups, features = out.shape
    size = inp.shape[3]
    if is_empty(out, inp):
        return
    single = groups * features * size * out.element_size()
    limit = min(limit, memory_budget())
    most = max(1, min(columns, limit // single))
    if _is_direct(inp, most, out):
        few = even_size(samples, max(1, min(limit, DIRECT) // (single * columns)))
        for rows, some in product(slices(samples, few), slices(columns, most)):
            piece = inp.product(out[some, rows], rows)
            yield some, rows, piece.view(-1, groups, some.stop - some.start, features, size)
        return
    few = even_size(samples, max(1, limit // (single * columns)))
    buffer: Tensor | None = None
    for rows in row_steps(inp, out.element_size(), few):
        right = _right(inp[rows])
        for some in slices(columns, most):
            left = _batched(out[some, rows])
            shape = (*left.shape[:2], size)
            if torch.is_grad_enabled():
                piece = torch.bmm(left, right)
            else:
                if buffer is None:
                    buffer = out.new_empty(min(few, samples) * groups * most * features * size)
                piece = buffer[: shape[0] * shape[1] * size].view(shape)
                torch.bmm(left, right, out=piece)
            yield some, rows, piece.view(-1, groups, some.stop - some.start, features, size)


def row_steps(inp: Rows, itemsize: int, most: int | None = None) -> Iterator[slice]:
    """Samples whose inputs fit into half of the cache together: a copy has a source, too."""
    samples, *shape = inp.shape
    # A batched product gives each thread whole samples, and each thread has a cache of its own.
    threads, single = torch.get_num_threads(), max(1, torch.Size(shape).numel() * itemsize)
    for_each = max(1, min(CACHE // 2, memory_budget()) // single)
    fitting = for_each * max(1, min(threads, memory_budget() // (for_each * single)))
    return slices(samples, fitting if most is None else min(most, fitting))


def is_empty(out: Tensor, inp: Rows) -> bool:
    """Whether there is nothing to add up: no sample, column, position or feature."""
    return 0 in out.shape or 0 in inp.shape


def slices(count: int, step: int) -> Iterator[slice]:
    """Consecutive parts of ``range(count)``, of one entry at least."""
    step = max(1, step)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _is_direct(inp: Rows, columns: int, out: Tensor) -> TypeGuard[DirectRows]:
    # The kernel's result does not carry a graph.
    return isinstance(inp, DirectRows) and not torch.is_grad_enabled() and inp.suits(columns, out)


def _right(inp: Tensor) -> Tensor:
    """``[n, S, G, I] → [n·G, S, I]``, a view for the usual layouts."""
    return inp.transpose(1, 2).flatten(0, 1)


def _batched(out: Tensor) -> Tensor:
    """``[v, n, S, G, O] → [n·G, v·O, S]``; copies several columns, in the order they are stored."""
    columns, samples, positions, groups, features = out.shape
    shape = (samples * groups, columns * features)
    if out.stride(4) == 1:
        return out.permute(1, 3, 2, 0, 4).reshape(shape[0], positions, shape[1]).transpose(1, 2)
    return out.permute(1, 3, 0, 4, 2).reshape(*shape, positions)


def _sum_of_squares(out: Tensor) -> Tensor:
    """``Σ_v out[v]²``. Shape ``[N, S, G, O]``."""
    return out[0].square() if out.shape[0] == 1 else out.square().sum(0)


def square_norm_of(mat: Tensor) -> Tensor:
    """``Σ_k mat[..., k]²``, without writing squares where autograd records nothing."""
    if torch.is_grad_enabled():
        return mat.square().sum(-1)
    norms: Tensor = torch.linalg.vector_norm(mat, dim=-1)
    return norms.square_()


def _squared(piece: Tensor) -> Tensor:
    return piece.square() if torch.is_grad_enabled() else piece.square_()


def _squared_norm_by_gram(out: Tensor, inp: Rows) -> Tensor:
    """``Σ_s Σ_t ⟨out_s, out_t⟩ ⟨inp_s, inp_t⟩``. Shape ``[V, N]``."""
    parts = []
    for rows in row_steps(inp, out.element_size()):
        right = _right(inp[rows])  # [n·G, S, I]
        inner = torch.bmm(right, right.mT)
        norms = []
        for column in out[:, rows]:
            left = _right(column)
            pairs = torch.bmm(left, left.mT)
            pairs = pairs * inner if torch.is_grad_enabled() else pairs.mul_(inner)
            norms.append(pairs.view(len(column), -1).sum(1))
        parts.append(torch.stack(norms))
    return torch.cat(parts, 1)
