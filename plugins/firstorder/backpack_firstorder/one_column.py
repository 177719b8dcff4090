"""Sums, sums of squares and norms of the products of one column, all in one pass.

Each piece of ``M[n] = Σ_s out[n, s] ⊗ inp[n, s]`` is formed once, and read for all of them while it
is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_firstorder.scaled import Norm, collected, vector_norm
from backpack_products.multiply import multiply_each
from backpack_products.tuning import CACHE, PIECE, even_size, is_unsplit, piece_size


class Moments(NamedTuple):
    """The moments of one product that were asked for; the others are ``None``."""

    sums: Tensor | None  # Σ_n M, [V, G, O, I]
    squares: Tensor | None  # Σ_v Σ_n M², [G, O, I]
    norms: Norm | None  # ‖M[v, n]‖, [V, N]


NOTHING = Moments(None, None, None)


def moments_of_column(
    out: Tensor, inp: Tensor, sum_: bool, square: bool, norm: bool, formed: Tensor | None = None
) -> Moments:
    """Moments of one column without groups, from pieces that stay in a core's own cache.

    Args:
        out: The column at the output. Shape ``[1, N, S, 1, O]``.
        inp: What the weight multiplies. Shape ``[N, S, 1, I]``.
        sum_: Whether ``Σ_n M`` is wanted.
        square: Whether ``Σ_n M²`` is wanted.
        norm: Whether ``‖M[n]‖`` is wanted.
        formed: A tensor to fill with ``M``. Shape ``[1, N, 1, O, I]``.
    """
    (_, samples, positions, _, features), size = out.shape, inp.shape[3]
    single = features * size * out.element_size()
    left = out.reshape(samples, positions, features).mT
    right = inp.reshape(samples, positions, size)
    target = None if formed is None else formed.view(samples, features, size)
    limit = PIECE if square or norm else CACHE  # pieces that are read once may be larger
    few = even_size(samples, max(1, piece_size(limit) // single))
    place = out.new_empty(few, features, size) if target is None else target
    parts: Iterable[tuple[Tensor, ...]] = ((left, right, place),)
    if few < samples:  # otherwise avoid views, which take time
        places = repeat(place) if target is None else place.split(few)
        parts = zip(left.split(few), right.split(few), places, strict=False)
    ones = out.new_ones(few)
    total = squares = None  # the first piece is written, not added to zeros
    norms: list[tuple[int, slice, Norm]] = []
    start = 0
    for some, seen, place in parts:
        count = some.shape[0]
        whole = place if place.shape[0] == count else place[:count]
        piece = multiply_each(some, seen, whole).view(count, -1)
        if norm:
            norms.append((0, slice(start, start + count), vector_norm(piece, 1)))
            start += count
        if sum_:
            total = _with(total, piece, ones[:count])
        if square and formed is not None and is_unsplit():
            squares = _with(squares, piece.square(), ones[:count])
        elif square and formed is None and count > 1:  # the last to read the piece
            squares = _with(squares, piece.square_(), ones[:count])
        elif square:
            squares = piece[0].square() if squares is None else squares.addcmul_(piece[0], piece[0])
            for row in piece[1:].unbind():
                squares.addcmul_(row, row)
    shape = (1, features, size)
    return Moments(
        None if total is None else total.view(1, *shape),
        None if squares is None else squares.view(shape),
        collected(out.new_zeros(1, samples), norms) if norm else None,
    )


def _with(total: Tensor | None, rows: Tensor, ones: Tensor) -> Tensor:
    """A sum, or nothing so far, plus ``Σ_k rows[k]``; a sum is added to in place."""
    return torch.mv(rows.T, ones) if total is None else total.addmv_(rows.T, ones)
