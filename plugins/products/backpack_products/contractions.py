"""Contractions of ``M`` for layers in weight-sharing form ``y[n, s, g] = W[g] x[n, s, g]``.

Pure functions of ``out`` (columns at the output, ``[V, N, S, G, O]``) and ``inp`` (what the weight
multiplies, ``[N, S, G, I]``). With ``M[v, n] = Σ_s out[v, n, s] ⊗ inp[n, s]``, of shape ``[V, N, G,
O, I]``, each function returns a reduction of ``M``, which is formed in pieces or not at all.

The first write to fresh memory takes as long as many multiply-adds. So pieces fit into the cache
and share a buffer, and patches of images are made for some samples at a time. See
``docs/design/products.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TypeGuard

import torch
from torch import Tensor

from backpack_products.host_functions import HostFunction
from backpack_products.multiply import are_one_by_one, multiply, multiply_each
from backpack_products.recycled import take
from backpack_products.rows import DirectRows, Rows, whole
from backpack_products.tuning import (
    CACHE,
    COPIED,
    DIRECT,
    LARGE,
    even_size,
    memory_budget,
    piece_size,
)
from backpack_products.values import is_lost


def products(out: Tensor, inp: Rows) -> Tensor:
    """``M`` itself. Shape ``[V, N, G, O, I]``."""
    columns, samples, positions, groups, features = out.shape
    size = inp.shape[3]
    if is_empty(out, inp):
        return out.new_zeros(columns, samples, groups, features, size)
    shape = columns, samples, groups, features, size
    if positions == 1:
        left, right = out.permute(0, 1, 3, 4, 2), whole(inp).transpose(1, 2)
        is_same = left.dtype is right.dtype  # else the result has another dtype than ``out``
        return torch.mul(left, right, out=take(out, shape) if is_same else None)
    if torch.is_grad_enabled():
        stacked = torch.stack([_batched(piece[None]) @ _right(inp[:]) for piece in out])
        return stacked.reshape(shape)
    if is_column(inp, out):
        left = out.reshape(samples, positions, features)
        target = take(out, (samples, features, size))
        result = multiply_each(left.mT, inp.reshape(samples, positions, size), target)
        return result.view(1, samples, 1, features, size)
    target = take(out, shape)
    result = out.new_empty(shape) if target is None else target
    for _ in form(out, inp, result):
        pass
    return result


def is_column(inp: Rows, out: Tensor) -> TypeGuard[Tensor]:
    """Whether ``out`` is one column without groups, ``inp`` a tensor, and autograd is off."""
    is_one = isinstance(inp, Tensor) and out.shape[0] == out.shape[3] == 1
    return is_one and not torch.is_grad_enabled()


def form(out: Tensor, inp: Rows, result: Tensor) -> Iterator[tuple[Tensor, int, slice]]:
    """Form ``M`` in a tensor; yields each finished part: its column, the number, the samples."""
    features, size = result.shape[3:]
    if _joins_columns(out, inp):
        for some, rows, piece in pieces(out, inp):
            result[some, rows] = piece.permute(2, 0, 1, 3, 4)
            yield from ((result[column], column, rows) for column in range(some.start, some.stop))
        return
    for rows in row_steps(inp, out.element_size()):
        right = _right(inp[rows])
        for column, (piece, target) in enumerate(zip(out[:, rows], result, strict=True)):
            multiply_each(_batched(piece[None]), right, target[rows].view(-1, features, size))
            yield target, column, rows


def squares(out: Tensor) -> Tensor:
    """``Σ_v out²`` for a single position. Shape ``[V, N, 1, G, O] → [N, G, O]``."""
    of_each = out.squeeze(2).square()
    return of_each.sum(0) if len(of_each) > 1 else of_each.squeeze(0)


def square_sum(out: Tensor, inp: Rows, known: Tensor | None = None) -> Tensor:
    """``Σ_v Σ_n M²``. Shape ``[G, O, I]``.

    Args:
        out: The columns.
        inp: The inputs.
        known: :func:`squares` of the columns, if they are known.
    """
    if out.shape[2] == 1 and not is_empty(out, inp):
        left, right = squares(out) if known is None else known, whole(inp).square()
        if right.shape[2] == 1:
            return multiply(left.flatten(0, 1).T, right.flatten(0, 2)).unsqueeze(0)
        return torch.bmm(left.permute(1, 2, 0), right.squeeze(1).transpose(0, 1))
    result = out.new_zeros(*out.shape[3:], inp.shape[3])
    for _, _, piece in pieces(out, inp):
        result = add_squares(result, piece.transpose(1, 2).flatten(0, 1))
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


def sums(out: Tensor, inp: Rows) -> Tensor:
    """``Σ_n M``, at the cost of a weight gradient for each column. Shape ``[V, G, O, I]``."""
    columns, _, _, groups, features = out.shape
    size = inp.shape[3]
    if is_empty(out, inp):
        return out.new_zeros(columns, groups, features, size)
    if columns == groups == 1 and isinstance(inp, Tensor):
        left, right = out.reshape(-1, features).T, inp.reshape(-1, size)
        return multiply(left, right).view(1, 1, features, size)
    total: Tensor | None = None
    if isinstance(inp, DirectRows) and not torch.is_grad_enabled():
        total = inp.total(out)
        if total is not None:
            return total
    for rows in row_steps(inp, out.element_size()):
        if groups == 1:  # without a copy of the columns
            left = out[:, rows].reshape(columns, -1, features).mT
            right = inp[rows].reshape(-1, size).expand(columns, -1, -1)
        else:
            left = out[:, rows].permute(3, 0, 4, 1, 2).reshape(groups, columns * features, -1)
            right = inp[rows].permute(2, 0, 1, 3).reshape(groups, -1, size)
        found = multiply_each(left, right)
        total = found if total is None else total + found
    assert total is not None
    if groups == 1:
        return total.unsqueeze(1)
    return total.reshape(groups, columns, features, size).transpose(0, 1)


def pieces(out: Tensor, inp: Rows, limit: int = CACHE) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields ``M`` for some columns of some samples at a time, all in one buffer.

    Use each piece before the next one overwrites it. All columns of a sample are one matrix
    product, ``[V·O, S] @ [S, I]``. A piece has at most ``limit`` bytes, or is one product.

    Yields:
        ``(columns, samples, piece)`` with a piece ``[n, G, v, O, I]``, samples outermost.
    """
    columns, samples, positions, groups, features = out.shape
    size = inp.shape[3]
    if is_empty(out, inp):
        return
    single = groups * features * size * out.element_size()
    limit = piece_size(limit)
    most = max(1, min(columns, limit // single))
    if (direct := _direct(inp, most, out)) and isinstance(inp, DirectRows):
        most, copied = direct, size if direct == 1 else max(size, positions)  # columns, if several
        fitting = min(limit, piece_size(DIRECT)) // (single // size * copied * most)
        few = even_size(samples, max(1, fitting))
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
                multiply_each(left, right, piece)
            yield some, rows, piece.view(-1, groups, some.stop - some.start, features, size)


def row_steps(inp: Rows, itemsize: int, most: int | None = None) -> Iterator[slice]:
    """Slices of samples whose inputs fit into half of the cache: a copy also reads its source."""
    samples, *shape = inp.shape
    # A batched product gives each thread whole samples, and each thread has a cache of its own.
    threads, single = torch.get_num_threads(), max(1, torch.Size(shape).numel() * itemsize)
    for_each = max(1, piece_size(CACHE // 2) // single)
    fitting = for_each * max(1, min(threads, memory_budget() // (for_each * single)))
    return slices(samples, fitting if most is None else min(most, fitting))


def is_empty(out: Tensor, inp: Rows) -> bool:
    """Whether there is nothing to sum: no sample, column, position or feature."""
    return 0 in out.shape or 0 in inp.shape


def slices(count: int, step: int) -> Iterator[slice]:
    """Yields consecutive slices of ``range(count)``, of at least one entry."""
    step = max(1, step)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _joins_columns(out: Tensor, inp: Rows) -> bool:
    """Whether one product of several columns of a sample is faster than one for each column."""
    columns, _, positions, _, features = out.shape
    single = columns * positions * features * inp.shape[3]
    # A kernel's products are copied. That takes longer than to create the inputs of few positions,
    # once for all columns (``python -m benchmarks.kernels --whole``).
    pays = positions > COPIED * columns * features
    is_direct = pays and bool(_direct(inp, columns, out))
    return is_direct or (columns > 1 and are_one_by_one(single, out))


def _direct(inp: Rows, columns: int, out: Tensor) -> int:
    """The number of columns at a time for which a kernel is suited; zero if there is no kernel."""
    # The kernel is not differentiable.
    if not isinstance(inp, DirectRows) or torch.is_grad_enabled():
        return 0
    halves = [columns >> n for n in range(columns.bit_length())]
    return next((some for some in halves if inp.suits(some, out)), 0)


def _right(inp: Tensor) -> Tensor:
    """``[n, S, G, I] → [n·G, S, I]``, a view for the usual layouts."""
    return inp.transpose(1, 2).flatten(0, 1)


def _batched(out: Tensor) -> Tensor:
    """``[v, n, S, G, O] → [n·G, v·O, S]``; several columns are copied in storage order."""
    columns, samples, positions, groups, features = out.shape
    shape = (samples * groups, columns * features)
    if out.stride(4) == 1:
        return out.permute(1, 3, 2, 0, 4).reshape(shape[0], positions, shape[1]).transpose(1, 2)
    return out.permute(1, 3, 0, 4, 2).reshape(*shape, positions)


def flattened(tensor: Tensor, axis: int) -> Tensor:
    """Flatten all axes from one on; an axis of length one if there are none."""
    return tensor.flatten(axis) if tensor.dim() > axis else tensor.unsqueeze(axis)


def square_norm_of(mat: Tensor) -> Tensor:
    """``Σ_k mat[..., k]²``; the squares are not stored unless autograd records."""
    if torch.is_grad_enabled():
        return mat.square().sum(-1)
    norms: Tensor = torch.linalg.vector_norm(mat, dim=-1)
    return norms.square_()


def gram(out: Tensor, inp: Rows) -> Tensor:
    """``⟨M[v, n], M[w, m]⟩``, without forming ``M`` if that is cheaper. Shape ``[V, N, V, N]``.

    Where positions cancel, inner products of positions lose digits relative to the norms of ``M``.
    On the host, a check shows this in single precision, and they are computed in double precision.
    """
    columns, samples, _, groups, features = out.shape
    size, count = inp.shape[3], columns * samples
    if is_empty(out, inp):
        return out.new_zeros(columns, samples, columns, samples)
    if is_gram_of_positions_cheaper(out, inp):
        inp = whole(inp)
        looks = out.shape[2] > 1 and out.dtype is torch.float32
        looks = looks and gram_by_positions.takes(out, inp)
        return (gram_by_positions if looks else _gram_by_positions)(out, inp)
    total = out.new_zeros(count, count)
    step = max(1, memory_budget() // (count * groups * size * out.element_size()))
    for start in range(0, features, step):
        some = products(out[..., start : start + step], inp).flatten(0, 1).flatten(1)
        total = total + multiply(some, some.T)
    return total.reshape(columns, samples, columns, samples)


def is_gram_of_positions_cheaper(out: Tensor, inp: Rows) -> bool:
    """Whether inner products of positions are cheaper than those of ``M``, and fit into memory."""
    columns, samples, positions, _, features = out.shape
    size, count = inp.shape[3], columns * samples
    rows, pairs = samples * positions, (count * positions) ** 2
    is_cheaper = pairs * features + rows**2 * size <= count * features * size * (positions + count)
    return is_cheaper and pairs * out.element_size() <= memory_budget()


def aligned_norms(out: Tensor, inp: Rows) -> Tensor:
    """The norms of ``M`` if all positions had one direction. Shape ``[V, N]``."""
    found = []
    for rows in row_steps(inp, out.element_size()):
        right = inp[rows].norm(dim=3)  # [n, S, G]
        each = [(column.norm(dim=3) * right).sum(1).norm(dim=1) for column in out[:, rows]]
        found.append(torch.stack(each))
    return torch.cat(found, 1)


@HostFunction
def gram_by_positions(out: Tensor, inp: Tensor) -> Tensor:
    """:func:`gram` by positions, in double precision if digits are lost."""
    found, most = _gram_by_positions(out, inp), aligned_norms(out, inp).flatten()
    squares = found.view(len(most), -1).diagonal()
    if not is_lost(squares, most.square(), out.dtype):
        return found
    return _gram_by_positions(out.double(), inp.double()).to(out.dtype)


def _gram_by_positions(out: Tensor, inp: Tensor) -> Tensor:
    """``Σ_g Σ_s Σ_t ⟨out[v, n, s], out[w, m, t]⟩ ⟨inp[n, s], inp[m, t]⟩``."""
    columns, samples, positions, groups, _ = out.shape
    total = out.new_zeros(columns, samples, columns, samples)
    for group in range(groups):
        left, right = out[:, :, :, group].flatten(0, 2), inp[:, :, group].flatten(0, 1)
        outer = (left @ left.T).reshape(2 * (columns, samples, positions))
        inner = (right @ right.T).reshape(1, samples, positions, 1, samples, positions)
        total = total + (outer * inner).sum((2, 5))
    return total
