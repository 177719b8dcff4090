"""Diagonals of ``J_θᵀ H J_θ`` for a Hessian ``H`` that may be indefinite. Imports rules only.

``H`` comes as columns with a sign for each sample, ``Σ_v σ_v S_v S_vᵀ``, or as a diagonal matrix.
As in :mod:`backpack_core.ops.generic`, ``[V, N, *θ]`` is made in pieces that fit into the memory
budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

import torch
from torch import Tensor

from backpack_core import contractions
from backpack_core.calls import ModuleCall
from backpack_core.ops import generic
from backpack_core.rules import AffinePairsRule, AffineRule, LayerRule


@singledispatch
def signed_square_sum(
    rule: LayerRule,
    call: ModuleCall,
    name: str,
    mat: Tensor,
    signs: Tensor,
    per_sample: bool = False,
) -> Tensor:
    """``Σ_n Σ_v σ[v, n] M[v, n]²``.

    Args:
        rule: How the module differentiates.
        call: The forward execution.
        name: Name of the parameter ``θ``.
        mat: Columns at the output. Shape ``[V, N, *out]``.
        signs: Their signs ``σ``. Shape ``[V, N]``.
        per_sample: Leave out the sum over samples.

    Returns:
        Shape ``[*θ]``, or ``[N, *θ]`` for each sample.
    """
    result: Tensor | None = None
    for columns, samples, part in generic.chunks(rule, call, name, mat):
        squares = weighted_squares(part, signs[columns, samples])
        if result is None:
            lead = mat.shape[1:2] if per_sample else ()
            result = part.new_zeros(*lead, *part.shape[2:])
        if per_sample:
            result[samples] += squares
        else:
            result += squares.sum(0)
    assert result is not None
    return result


@signed_square_sum.register
def signed_square_sum_affine(
    rule: AffinePairsRule,
    call: ModuleCall,
    name: str,
    mat: Tensor,
    signs: Tensor,
    per_sample: bool = False,
) -> Tensor:
    """Without ``M`` where no positions are shared, else in pieces that fit into the cache."""
    out, inp = rule.affine_pair(call, name, mat)
    if inp is None:
        squares = weighted_squares(out.sum(2), signs)
        return rule.from_matrix(call, name, squares if per_sample else squares.sum(0))
    if out.shape[2] == 1:
        product = _of_positions(weighted_squares(out, signs), inp, per_sample)
        return rule.from_matrix(call, name, product)
    lead = out.shape[1:2] if per_sample else ()
    result = out.new_zeros(*lead, *out.shape[3:], inp.shape[3])
    for columns, rows, piece in contractions.pieces(out, inp):  # [n, G, v, O, I]
        weighted = piece.square() * signs[columns, rows].T[:, None, :, None, None]
        if per_sample:
            result[rows] += weighted.sum(2)
        else:
            result += weighted.sum((0, 2))
    return rule.from_matrix(call, name, result)


@singledispatch
def diagonal_square_sum(
    rule: LayerRule, call: ModuleCall, name: str, diagonal: Tensor, per_sample: bool = False
) -> Tensor:
    """``Σ_n diag(J_θᵀ diag(d) J_θ)``.

    Args:
        rule: How the module differentiates.
        call: The forward execution.
        name: Name of the parameter ``θ``.
        diagonal: ``d`` at the output. Shape ``[N, *out]``.
        per_sample: Leave out the sum over samples.

    Returns:
        Shape ``[*θ]``, or ``[N, *θ]`` for each sample.
    """
    parts = [
        signed_square_sum(rule, call, name, mat, signs, per_sample)
        for mat, signs in unit_columns(diagonal, generic.memory_budget())
    ]
    return torch.stack(parts).sum(0)


@diagonal_square_sum.register
def diagonal_square_sum_affine(
    rule: AffineRule, call: ModuleCall, name: str, diagonal: Tensor, per_sample: bool = False
) -> Tensor:
    """``Σ_n Σ_s d[n, s] ⊗ x[n, s]²``."""
    out = rule.affine_output(call, diagonal.unsqueeze(0)).squeeze(0)  # [N, S, G, O]
    if name == "bias":
        squares = out.sum(1)
        return rule.from_matrix(call, name, squares if per_sample else squares.sum(0))
    product = _of_positions(out, rule.affine_rows(call), per_sample)
    return rule.from_matrix(call, name, product)


def _of_positions(out: Tensor, inp: contractions.Rows, per_sample: bool) -> Tensor:
    """``Σ_s out ⊗ inp²`` for ``[N, S, G, O]`` and ``[N, S, G, I]``: ``[N, G, O, I]`` or its sum."""
    parts = []
    total: Tensor | None = None
    for rows in contractions.row_steps(inp, out.element_size()):
        left = out[rows].permute(0, 2, 3, 1)  # [n, G, O, S]
        right = inp[rows].square().transpose(1, 2)  # [n, G, S, I]
        if per_sample:
            parts.append(left @ right)
            continue
        stacked = left.permute(1, 2, 0, 3).flatten(2), right.transpose(0, 1).flatten(1, 2)
        product = stacked[0] @ stacked[1]
        total = product if total is None else total + product
    return torch.cat(parts) if total is None else total


def unit_columns(diagonal: Tensor, budget: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """``diag(d)`` as columns ``√|d_i| e_i`` with the sign of ``d_i``.

    Args:
        diagonal: Shape ``[N, *out]``.
        budget: How many bytes of columns to make at a time; ``None`` for all at once.

    Yields:
        Columns ``[V, N, *out]`` and signs ``[V, N]``.
    """
    flat = diagonal.flatten(1)
    samples, size = flat.shape
    step = size if budget is None else max(1, budget // max(1, flat.nbytes))
    root, signs = flat.abs().sqrt(), flat.sign()
    for start in range(0, size, step):
        rows = torch.arange(start, min(start + step, size), device=flat.device)
        mat = flat.new_zeros(len(rows), samples, size)
        mat[rows - start, :, rows] = root[:, rows].T
        yield mat.reshape(len(rows), *diagonal.shape), signs[:, rows].T


def weighted_squares(mat: Tensor, signs: Tensor) -> Tensor:
    """``Σ_v σ[v, n] mat[v, n]²``, in pieces that fit into the cache. ``[V, N, *] → [N, *]``."""
    weights = signs.reshape(*signs.shape, *[1] * (mat.dim() - 2))
    step = max(1, contractions.CACHE // max(1, mat[0].nbytes))
    result = torch.zeros_like(mat[0])
    for start in range(0, len(mat), step):
        rows = slice(start, start + step)
        result += (mat[rows].square() * weights[rows]).sum(0)
    return result
