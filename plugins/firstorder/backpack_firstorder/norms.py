"""Norms of products that neither overflow nor underflow.

``‖M‖²`` leaves the range of single precision for norms beyond 10¹⁹ and below 10⁻¹⁹, and that of
half precision beyond 256; and so may squares of the factors of ``M``, which a norm in the middle of
the range is made of. Norms are taken of numbers that were divided by the largest of them. On a CPU
the usual contraction comes first, and the careful one where it is not good enough. On other
devices, to look at values means to wait for them: there the careful one is the only one.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from backpack_core.contract.affine import AffineProduct, for_weights
from backpack_core.contract.contractions import row_steps
from backpack_core.contract.lookup import LookupProduct
from backpack_core.contract.operations import OpenFunction, Operation, squared_norm
from backpack_core.contract.product import DenseProduct, PlacedProduct, SampleProduct, SumProduct
from backpack_core.contract.rows import Rows
from backpack_core.contract.scale import ScaleProduct
from backpack_core.values import any_of, at_least_single, is_half, is_symbolic
from backpack_firstorder import contractions, products
from backpack_firstorder.squares import bounds


@Operation
def norm(product: SampleProduct) -> Tensor:
    """``‖M[v, n]‖``, in single precision at least. Shape ``[V, N]``."""
    wide = in_single(product)
    return careful_norm(wide) if is_doubtful(product) else squared_norm(wide).sqrt()


def is_doubtful(product: SampleProduct) -> bool:
    """Whether the usual contraction's squares may be wrong, or may not be looked at."""
    known: bool | None = product.results.get("doubtful")
    if known is None:
        known = product.results["doubtful"] = _is_doubtful(in_single(product))
    return known


def _is_doubtful(product: SampleProduct) -> bool:
    """Whether a square is not finite, or tiny where the product need not be zero."""
    if not is_seen(product.like):
        return not is_symbolic(product.like) and bool(product.columns * product.samples)
    squares, least = squared_norm(product).detach(), product.results.get(products.LEAST)
    if not squares.numel() or (are_in_range(squares) and are_exact(squares, least)):
        return False
    lowest = bounds(squares.dtype)[0]
    small = squares < (lowest if least is None else least.clamp(min=lowest))
    return any_of(~squares.isfinite() | (small & _may_differ_from_zero(product)))


def are_exact(squares: Tensor, least: Tensor | None) -> bool:
    """Whether squares on a CPU have all of their digits, if those do that are at least so large."""
    return least is None or bool((squares >= least).all())


def is_seen(like: Tensor) -> bool:
    """Whether values on the tensor's device can be looked at without waiting for them."""
    return like.device.type == "cpu" and not is_symbolic(like)


def are_in_range(squares: Tensor, count: int = 1) -> bool:
    """Whether no square is tiny, and ``count`` of them add up to a finite number; CPU only."""
    least, most = bounds(squares.dtype)
    # One question, whose answer is nearly always the same: two numbers never are.
    return torch.equal(squares.clamp(least, most / count), squares)


def _may_differ_from_zero(product: SampleProduct) -> Tensor:
    like = product.like.detach()
    if isinstance(product, (SumProduct, PlacedProduct)) or not like[0, 0].numel():
        return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
    return (like.reshape(*like.shape[:2], -1) != 0).any(2)


def in_single(product: SampleProduct) -> SampleProduct:
    """Cast a product in half precision to single precision; others stay as they are."""
    if not is_half(product.like.dtype):
        return product
    if "single" not in product.results:
        wide = _in_single(product)
        for name in ("name", "module", "rule", "needs", "roots"):
            setattr(wide, name, getattr(product, name))
        product.results["single"] = wide
    found: SampleProduct = product.results["single"]
    return found


@singledispatch
def _in_single(product: SampleProduct) -> SampleProduct:
    def form(columns: slice, samples: slice) -> Tensor:
        return at_least_single(product.part(columns, samples))

    like = product.like.new_ones(product.columns, product.samples, dtype=torch.float32)
    return DenseProduct(form=form, mat=like, shape=product.shape)


@_in_single.register
def _in_single_affine(product: AffineProduct) -> AffineProduct:
    inp = product.inp
    if inp is not None:
        inp = at_least_single(inp) if isinstance(inp, Tensor) else WideRows(inp)
    return AffineProduct(at_least_single(product.out), inp, product.shape, product.arrange)


@_in_single.register
def _in_single_scale(product: ScaleProduct) -> ScaleProduct:
    inp = None if product.inp is None else at_least_single(product.inp)
    return ScaleProduct(at_least_single(product.out), inp, product.shape)


@_in_single.register
def _in_single_lookup(product: LookupProduct) -> LookupProduct:
    return LookupProduct(at_least_single(product.out), product.row, product.shape)


@_in_single.register
def _in_single_sum(product: SumProduct) -> SumProduct:
    return SumProduct([in_single(part) for part in product.parts])


class WideRows:
    """Inputs ``[N, S, G, I]`` in single precision, for some samples at a time."""

    def __init__(self, inp: Rows) -> None:
        """Store them."""
        self._inp, self.shape = inp, inp.shape

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples."""
        return at_least_single(self._inp[rows])


# The careful way ----------------------------------------------------------------------------------


@OpenFunction
def careful_norm(product: SampleProduct) -> Tensor:
    """``‖M[v, n]‖``, also where the square is out of range. Shape ``[V, N]``."""
    result = product.new_zeros(product.columns, product.samples)
    for columns, samples, part in product.pieces():
        result[columns, samples] = vector_norm(part, 2)
    return result


@for_weights(careful_norm)
def careful_norm_affine(product: AffineProduct, inp: Rows) -> Tensor:
    """By :func:`product_norm`, from the factors."""
    return product_norm(product.out, inp)


@careful_norm.register
def careful_norm_lookup(product: LookupProduct) -> Tensor:
    """By scaled columns; only the rows that were looked up are formed."""
    scale = scale_of(product.out, 2)
    scaled = LookupProduct(product.out / _spread(scale, 4), product.row, product.shape)
    return squared_norm(scaled).sqrt() * scale


def vector_norm(mat: Tensor, lead: int) -> Tensor:
    """Euclidean norm over all but the first ``lead`` axes, in single precision at least."""
    wide = at_least_single(mat).flatten(lead) if mat.dim() > lead else mat.unsqueeze(-1)
    scale = scale_of(wide, lead)
    return (wide / scale.unsqueeze(-1)).square().sum(-1).sqrt() * scale


def product_norm(out: Tensor, inp: Rows) -> Tensor:
    """``‖M[v, n]‖`` with ``M[v, n] = Σ_s out[v, n, s] ⊗ inp[n, s]``, in single precision at least.

    Args:
        out: Columns at the output, ``[V, N, S, G, O]``.
        inp: What the weight multiplies, ``[N, S, G, I]``.

    Returns:
        Shape ``[V, N]``. Not finite where an entry of a factor is not.
    """
    out = at_least_single(out)
    if not out.numel() or not inp.shape.numel():
        return out.new_zeros(out.shape[:2])
    whole = isinstance(inp, Tensor) and out.shape[2] == 1
    steps = [slice(0, out.shape[1])] if whole else row_steps(inp, out.element_size())
    return torch.cat([_norm_of(out[:, rows], at_least_single(inp[rows])) for rows in steps], 1)


def _norm_of(out: Tensor, inp: Tensor) -> Tensor:
    """The same where inputs are there: each group by itself, and each position's inputs."""
    samples, positions, groups = inp.shape[:3]
    out = out.transpose(2, 3).flatten(1, 2).unsqueeze(3)  # [V, n·G, S, 1, O]
    inp = inp.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # [n·G, S, 1, I]
    largest = _largest(inp, 2)
    heights = _divisor(largest)
    scale, left = _scaled(out)
    if positions > 1:  # what a position weighs is then in its columns, of zeros nothing
        heavy = heights * (largest != 0)
        highest = _divisor(heavy.amax(1))
        peaks, left = _scaled(left * _spread(heavy / highest.unsqueeze(1), 4))
        # Neither product leaves the range where all three together do not.
        scale = torch.maximum(scale, highest) * peaks * torch.minimum(scale, highest)
    else:
        scale = scale * heights.squeeze(1)
    squares = contractions.squared_norm(left, inp / _spread(heights, 4))
    scale = scale * (squares.detach() != 0)  # of a group of zeros it says nothing
    squares, scale = (mat.unflatten(1, (samples, groups)) for mat in (squares, scale))
    highest = _divisor(scale.amax(2))
    sums: Tensor = (squares * (scale / highest.unsqueeze(2)).square()).sum(2)
    return sums.sqrt() * highest


def _scaled(mat: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each column of each sample, ``[V, N]``, and ``[V, N, *]`` divided by it."""
    scale = scale_of(mat, 2)
    return scale, mat / _spread(scale, mat.dim())


def scale_of(mat: Tensor, lead: int) -> Tensor:
    """The largest absolute value over all but the first ``lead`` axes, to divide by.

    One where that is zero or not finite. It is a constant: the norm does not depend on it.
    """
    return _divisor(_largest(mat, lead))


def _largest(mat: Tensor, lead: int) -> Tensor:
    flat = mat.detach().flatten(lead).abs()
    return flat.amax(-1) if flat.shape[-1] else flat.new_zeros(flat.shape[:-1])


def _divisor(found: Tensor) -> Tensor:
    return torch.where(found.isfinite() & (found > 0), found, torch.ones_like(found))


def _spread(scale: Tensor, dims: int) -> Tensor:
    return scale.reshape(*scale.shape, *[1] * (dims - scale.dim()))
