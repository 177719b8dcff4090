"""Diagonals of ``J_θᵀ H J_θ`` for a Hessian ``H`` that may be indefinite.

``H`` comes as columns with a sign for each sample, ``Σ_v σ_v S_v S_vᵀ``, or as a diagonal matrix.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from backpack_products import contractions
from backpack_products.affine import AffineProduct, for_weights
from backpack_products.contractions import flattened
from backpack_products.open_functions import OpenFunction
from backpack_products.product import SampleProduct
from backpack_products.rows import Rows, whole
from backpack_products.tuning import CACHE, piece_size
from backpack_secondorder.position_pairs import diagonal, sample_diagonals


@OpenFunction
def signed_square_sum(product: SampleProduct, signs: Tensor, per_sample: bool = False) -> Tensor:
    """``Σ_n Σ_v σ[v, n] M[v, n]²``.

    Args:
        product: ``M``.
        signs: The signs ``σ`` of the columns. Shape ``[V, N]``, or ``[]`` for one of all.
        per_sample: Leave out the sum over samples.

    Returns:
        Shape ``[*θ]``, or ``[N, *θ]`` for each sample.
    """
    if not signs.dim():
        return (sample_diagonals(product) if per_sample else diagonal(product)) * signs
    lead = (product.samples,) if per_sample else ()
    result = product.new_zeros(*lead, *product.shape)
    for columns, samples, part in product.pieces():
        squares = weighted_squares(part, signs[columns, samples])
        if per_sample:
            result[samples] += squares
        else:
            result = result + squares.sum(0)
    return result


@for_weights(signed_square_sum)
def signed_square_sum_affine(
    product: AffineProduct, inp: Rows, signs: Tensor, per_sample: bool = False
) -> Tensor:
    """Without ``M`` if no positions share the weight."""
    if product.positions > 1 or not (signs.dim() or per_sample):
        return signed_square_sum.definition(product, signs, per_sample)
    squares = weighted_squares(product.out, signs)
    return product.to_parameter(by_position(squares, inp, per_sample))


def diagonal_square_sum(product: AffineProduct, per_sample: bool = False) -> Tensor:
    """``Σ_n diag(J_θᵀ diag(d) J_θ) = Σ_n Σ_s d[n, s] ⊗ x[n, s]²`` of an affine layer.

    Args:
        product: Holds ``d`` instead of a single column.
        per_sample: Leave out the sum over samples.

    Returns:
        Shape ``[*θ]``, or ``[N, *θ]`` for each sample.
    """
    out = product.out.squeeze(0)  # [N, S, G, O]
    if product.inp is None:
        squares = out.sum(1)
        return product.to_parameter(squares if per_sample else squares.sum(0))
    return product.to_parameter(by_position(out, product.inp, per_sample))


def by_position(out: Tensor, inp: Rows, per_sample: bool) -> Tensor:
    """``Σ_s out ⊗ inp²`` for ``[N, S, G, O]`` and ``[N, S, G, I]``: ``[N, G, O, I]`` or its sum."""
    total = out.new_zeros(*out.shape[2:], inp.shape[3])
    if not out.numel() or not inp.shape.numel():
        return total.expand(len(out), *total.shape).clone() if per_sample else total
    if per_sample and out.shape[1] == 1:
        return contractions.products(out.unsqueeze(0), whole(inp).square()).squeeze(0)
    parts = []
    for samples in contractions.row_steps(inp, out.element_size()):
        left, right = out[samples], inp[samples].square()
        if per_sample:
            columns = rearrange(left, "n s g o -> n g o s")
            parts.append(columns @ rearrange(right, "n s g i -> n g s i"))
            continue
        columns = rearrange(left, "n s g o -> g o (n s)")
        total = torch.baddbmm(total, columns, rearrange(right, "n s g i -> g (n s) i"))
    return torch.cat(parts) if per_sample else total


def unit_columns(diagonal: Tensor, entries: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """``diag(d)`` as columns ``√|d_i| e_i`` with the sign of ``d_i``.

    Args:
        diagonal: Shape ``[N, *out]``.
        entries: Which of them, counted along the flattened ``*out``.

    Returns:
        Columns ``[V, N, *out]`` and signs ``[V, N]``.
    """
    flat = flattened(diagonal, 1)
    samples, size = flat.shape
    places = torch.arange(size, device=flat.device)[entries]
    mat = flat.new_zeros(len(places), samples, size)
    scale = flat.abs().sqrt()
    mat[torch.arange(len(places), device=flat.device), :, places] = scale[:, places].T
    return mat.reshape(len(places), *diagonal.shape), flat.sign()[:, places].T


def weighted_squares(mat: Tensor, signs: Tensor) -> Tensor:
    """``Σ_v σ[v, n] mat[v, n]²``, in pieces that fit into the cache. Shape ``[N, *]``."""
    # Under autocast, columns may have started in another precision.
    weights = signs.to(mat.dtype).expand(mat.shape[:2])[(..., *[None] * (mat.dim() - 2))]
    step = max(1, piece_size(CACHE) // max(1, mat[:1].nbytes))
    result = mat.new_zeros(mat.shape[1:])
    for some in contractions.slices(len(mat), step):
        result = result + (mat[some].square() * weights[some]).sum(0)
    return result
