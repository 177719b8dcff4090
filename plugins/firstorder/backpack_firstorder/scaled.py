"""Norms of vectors, even if their squares overflow or underflow.

``‖M‖²`` leaves the range of single precision for norms above 10¹⁹ and below 10⁻¹⁹, and that of half
precision above 256. Squares of the factors of ``M`` may do so even if the norm is moderate. Only
the values show it, and on an accelerator the host would have to wait for them. So squares are
computed there in double precision, which has room for all of them; numbers in double precision are
first divided by the largest one. On the host, squares are computed in single precision, which is
three times as fast, and checked: if one may be out of range, they are computed as on an
accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_products.contractions import flattened, square_norm_of
from backpack_products.host_functions import HostFunction
from backpack_products.tuning import CACHE, memory_budget, piece_size
from backpack_products.values import at_least_single, has_double

# Between these bounds nothing is lost: each of up to 10⁸ squares is off by at most 10⁻³⁸.
_LEAST, _MOST = 1e-24, 1e37
# This many numbers can be added in single precision, to six digits.
_ADDED = 2**18
# Rounding in a sum of inner products is below this many units of the sum of their absolute values.
_UNITS = 16
# For fewer numbers, double precision is faster than the check.
_FEW = 2**15


class Norm(NamedTuple):
    """Norms of any size, ``√squares · scale``.

    Attributes:
        squares: The squares; at least in double precision without a scale.
        scale: A constant of the same shape; ``None`` stands for one.
    """

    squares: Tensor
    scale: Tensor | None = None

    def value(self) -> Tensor:
        """The norms."""
        root = self.squares.sqrt()
        return root if self.scale is None else root * self.scale

    def squared(self) -> Tensor:
        """The squared norms, which may overflow or underflow."""
        return self.squares if self.scale is None else self.squares * self.scale * self.scale

    def dividing(self, number: Any) -> Tensor:
        """A number divided by the norms."""
        root = self.squares.sqrt()
        quotient: Tensor = number / root if self.scale is None else number / self.scale / root
        return quotient

    def times(self, other: Norm) -> Norm:
        """The norms of outer products."""
        scale = self.scale
        if scale is not None and other.scale is not None:
            scale = scale * other.scale
        return Norm(self.squares * other.squares, scale)

    def total(self, axis: int) -> Norm:
        """The norms of vectors from the norms of their parts along an axis."""
        squares, scale = self
        if scale is None:
            return Norm(squares.squeeze(axis) if squares.shape[axis] == 1 else squares.sum(axis))
        scale = scale * (squares.detach() != 0)  # the scale of a part of zeros says nothing
        highest = divisor(scale.amax(axis))
        share = scale / highest.unsqueeze(axis)
        return Norm((squares * share.square()).sum(axis), highest)

    def map(self, function: Any) -> Norm:
        """Squares and scale in another arrangement."""
        return Norm(function(self.squares), None if self.scale is None else function(self.scale))

    def wide(self) -> Norm:
        """The same norms without a scale, if double precision has room for the squares."""
        wide = wider(self.squares)
        if wide is None or self.scale is None:
            return self
        return Norm(self.squares.to(wide) * self.scale.to(wide).square())


def stacked(norms: Sequence[Norm]) -> Norm:
    """Several norms, stacked on a new first axis."""
    dtype = reduce(torch.promote_types, (n.squares.dtype for n in norms))
    squares = torch.stack([n.squares.to(dtype) for n in norms])
    if all(n.scale is None for n in norms):
        return Norm(squares)
    every = [torch.ones_like(n.squares) if n.scale is None else n.scale for n in norms]
    return Norm(squares, torch.stack([scale.to(dtype) for scale in every]))


def collected(like: Tensor, found: Iterable[tuple[Any, Any, Norm]]) -> Norm:
    """Norms ``[V, N]``, put together from parts with some columns and samples.

    Args:
        like: Zeros of that shape, for what is in no part.
        found: The columns, samples and norms of each part.
    """
    whole: Norm | None = None
    for columns, samples, part in found:
        if part.squares.numel() == like.numel():
            return part.map(lambda numbers: numbers.view(like.shape))
        if whole is None:
            scale = None if part.scale is None else part.scale.new_ones(like.shape)
            whole = Norm(part.squares.new_zeros(like.shape), scale)
        whole.squares[columns, samples] = part.squares
        if whole.scale is not None and part.scale is not None:
            whole.scale[columns, samples] = part.scale
    return Norm(like) if whole is None else whole


def vector_norm(mat: Tensor, lead: int) -> Norm:
    """Euclidean norms over all but the first ``lead`` axes."""
    flat, wide = mat if mat.dim() == lead + 1 else flattened(mat, lead), wider(mat)
    if wide is None:
        flat = at_least_single(flat)
        scale = scale_of(flat, lead)
        return Norm(square_norm_of(flat / scale.unsqueeze(-1)), scale)
    if torch.is_grad_enabled():
        return Norm(square_norm_of(flat.to(wide)))
    if flat.numel() >= _FEW and may_look(squares_of_rows, flat):
        return Norm(squares_of_rows(flat))
    return Norm(_wide_squares(flat, wide))


def _wide_squares(flat: Tensor, wide: torch.dtype) -> Tensor:
    """``Σ_k flat[..., k]²`` in double precision."""
    most, size = memory_budget(), flat.nbytes
    if flat.device.type == "cpu":
        most = piece_size(CACHE // 2)
    if size <= most:
        squares: Tensor = torch.linalg.vector_norm(flat, dim=-1, dtype=wide).square_()
        return squares
    # Torch copies what it casts: parts of it stay in the cache.
    axis = max(range(flat.dim() - 1), key=flat.shape.__getitem__)
    parts = flat.split(max(1, flat.shape[axis] * most // size), axis)
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in parts]
    return torch.cat(norms, axis).square_()


@HostFunction
def squares_of_rows(flat: Tensor) -> Tensor:
    """``Σ_k flat[..., k]²``, from single precision unless a square may be out of range."""
    parts = flat.split(_ADDED, -1) if flat.shape[-1] > _ADDED else (flat,)
    norms = [torch.linalg.vector_norm(some, dim=-1) for some in parts]
    squares = reduce(torch.add, [norm.double().square_() for norm in norms])
    least, most = squares.aminmax()  # if a square is not a number, both are not
    is_kept = bool(least > _LEAST) and bool(most < _MOST)
    return squares if is_kept else _wide_squares(flat, torch.float64)


def unless_cancelled(squares: Tensor, most: Tensor, dtype: torch.dtype) -> Tensor:
    """Squares of norms of sums, at least as large as what rounding may hide of them.

    Terms that cancel leave rounding alone, which may even be negative. A norm that is too small
    would let a sample exceed the bound that it is clipped to.

    Args:
        squares: What inner products of the terms add up to.
        most: The squares if all terms had one direction.
        dtype: The precision of the inner products.
    """
    least = _UNITS * torch.finfo(dtype).eps * most.detach()
    return torch.where(squares < least, least, squares)


def may_look(function: HostFunction, mat: Tensor, *others: Any) -> bool:
    """Whether squares may be computed by a function in single precision first, and checked."""
    return mat.dtype is torch.float32 and wider(mat) is not None and function.takes(mat, *others)


def wider(like: Tensor) -> torch.dtype | None:
    """The tensor in double precision, if its device has it."""
    return torch.float64 if like.dtype.itemsize < 8 and has_double(like.device) else None


def scale_of(mat: Tensor, lead: int) -> Tensor:
    """The largest absolute value over all but the first ``lead`` axes, to divide by.

    It is a constant: the norm does not depend on it.
    """
    return divisor(largest(mat, lead))


def largest(mat: Tensor, lead: int) -> Tensor:
    """The largest absolute value over all but the first ``lead`` axes; zero if empty."""
    flat = mat.detach().flatten(lead)
    if 1 < flat.stride(-1) < 32:  # few adjacent numbers, as in patches, take five times as long
        flat = flat.contiguous()
    flat = flat.abs()
    return flat.amax(-1) if flat.shape[-1] else flat.new_zeros(flat.shape[:-1])


def divisor(found: Tensor) -> Tensor:
    """The nearest number that is a safe divisor: its reciprocal is finite."""
    numbers = torch.finfo(found.dtype)
    return found.clamp(numbers.tiny, numbers.max)


def spread(scale: Tensor, dims: int) -> Tensor:
    """A tensor with axes of length one added, to broadcast with what it divides."""
    return scale.reshape(*scale.shape, *[1] * (dims - scale.dim()))
