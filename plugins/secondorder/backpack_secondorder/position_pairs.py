"""Diagonals of products with many columns, by pairs of positions if that is cheaper.

    Σ_v (Σ_s out[v, s] inp[s])² = Σ_s Σ_t (Σ_v out[v, s] out[v, t]) inp[s] inp[t]

On the right side, columns occur only in the sum in brackets, which does not contain ``inp``.
A timing is in ``docs/design/products.md``.

Where positions cancel, as for keys of attention with inputs far from zero, pairs are larger than
their sum, and rounding may hide it. On the host, a check shows this in single precision, and the
left side is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products import SampleProduct, contractions
from backpack_products.affine import AffineProduct, reads_formed
from backpack_products.contractions import slices
from backpack_products.host_functions import HostFunction
from backpack_products.open_functions import Operation
from backpack_products.operations import per_sample_square_sum, square_sum
from backpack_products.recycled import taken_zeros
from backpack_products.rows import Rows
from backpack_products.tuning import CACHE, memory_budget, piece_size
from backpack_products.values import is_lost
from backpack_secondorder import sample_squares

# Cost of a multiply-add in the small products over columns, and of an entry that is copied or
# multiplied for a pair; the unit is a multiply-add of a large product.
_SMALL, _COPIED = 8, 60


@Operation
def diagonal(product: SampleProduct) -> Tensor:
    """``Σ_v Σ_n M[v, n]²``. Shape ``[*θ]``."""
    return square_sum(product)


@Operation
def sample_diagonals(product: SampleProduct) -> Tensor:
    """``Σ_v M[v, n]²``. Shape ``[N, *θ]``."""
    return per_sample_square_sum(product)


@diagonal.register
def diagonal_affine(product: AffineProduct) -> Tensor:
    """By :func:`by_pairs` if cheaper; a sum of the samples' diagonals if these are known."""
    if product.inp is None or reads_formed(product):
        return square_sum(product)
    if per_sample_square_sum in product.needs and product.positions > 1:
        return sample_diagonals(product).sum(0)
    if not is_cheaper(product):
        return square_sum(product)
    return product.to_parameter(by_pairs(product.out, product.inp).sum(0))


@sample_diagonals.register
def sample_diagonals_affine(product: AffineProduct) -> Tensor:
    """By :func:`by_pairs` if that is cheaper."""
    if product.inp is None or not is_cheaper(product):
        return per_sample_square_sum(product)
    return product.to_parameter(by_pairs(product.out, product.inp, is_summed=False))


def is_cheaper(product: AffineProduct) -> bool:
    """Whether pairs take fewer multiply-adds, counted for one group of one sample."""
    columns, _, positions, groups, features = product.out.shape
    if product.inp is None or positions == 1 or torch.is_grad_enabled() or reads_formed(product):
        return False
    size, pairs = product.inp.shape[3], positions * (positions + 1) // 2
    kernel = features * positions**2
    if groups * kernel * product.out.element_size() > memory_budget():
        return False
    taken = _SMALL * columns * kernel + pairs * (features * size + _COPIED * (features + size))
    return taken < columns * positions * features * size


def by_pairs(out: Tensor, inp: Rows, is_summed: bool = True) -> Tensor:
    """``Σ_v M²`` of columns ``[V, N, S, G, O]`` and inputs ``[N, S, G, I]``.

    Args:
        out: Columns at the output.
        inp: What the weight multiplies.
        is_summed: Add up samples.

    Returns:
        Shape ``[N, G, O, I]``, or ``[1, G, O, I]`` for the sum.
    """
    _, samples, positions, groups, features = out.shape
    size = inp.shape[3]
    shape = (1 if is_summed else samples, groups, features, size)
    result, own = taken_zeros(out, shape), out.new_zeros(shape)
    first, second = torch.triu_indices(positions, positions, 1, device=out.device)
    places = first * positions + second
    step = max(1, piece_size(CACHE) // (2 * groups * size * out.element_size()))
    for n in range(samples):
        rows = slice(n, n + 1)
        right = inp[rows][0].transpose(0, 1).contiguous()  # [G, S, I]
        left = out[:, n].permute(2, 3, 1, 0).flatten(0, 1)  # [G·O, S, V]
        kernel = (left @ left.mT).view(groups, features, positions**2)
        target = result[0 if is_summed else n]
        for some in slices(len(places), step):
            weights = kernel[:, :, places[some]]
            target.baddbmm_(weights, right[:, first[some]].mul_(right[:, second[some]]), alpha=2)
        own[0 if is_summed else n].baddbmm_(kernel[:, :, :: positions + 1], right.square())
    looks = out.dtype is torch.float32 and unless_lost.takes(result, own, out, inp)
    return unless_lost(result, own, out, inp) if looks else result.add_(own)


@HostFunction
def unless_lost(others: Tensor, own: Tensor, out: Tensor, inp: Rows) -> Tensor:
    """The sum over all pairs, or the left side if digits are lost.

    Args:
        others: The sum over pairs of different positions, of each sample or of all.
        own: That of positions with themselves, which times their number is a bound.
        out: Columns at the output.
        inp: What the weight multiplies.
    """
    found, (samples, positions) = others + own, out.shape[1:3]
    if not is_lost(found, own, out.dtype, positions):
        return found
    if len(found) == samples:
        return sample_squares.contracted(out, inp)
    return contractions.square_sum(out, inp).unsqueeze(0)
