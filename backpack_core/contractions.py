"""Contractions of layers in weight-sharing form ``y[n, s, g] = W[g] x[n, s, g]``. Imports torch only.

Pure functions of ``out`` (columns at the output, ``[V, N, S, G, O]``) and ``inp`` (what the weight
multiplies, ``[N, S, G, I]``). With ``M[v, n] = Σ_s out[v, n, s] ⊗ inp[n, s]``, of shape
``[V, N, G, O, I]``, each returns a reduction of ``M``, formed piece by piece or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Products are consumed at once, so they should stay in the cache between being made and reduced.
CACHE = 4 * 2**20


def products(out: Tensor, inp: Tensor) -> Tensor:
    """``M`` itself. Shape ``[V, N, G, O, I]``."""
    columns, samples, positions, groups, features = out.shape
    size = inp.shape[-1]
    if positions == 1:
        return out.squeeze(2).unsqueeze(-1) * inp.squeeze(1).unsqueeze(-2)
    right = inp.permute(0, 2, 1, 3).reshape(samples * groups, positions, size)
    left = out.permute(0, 1, 3, 4, 2).reshape(columns, samples * groups, features, positions)
    if columns == 1 or torch.is_grad_enabled():
        result = torch.stack([torch.bmm(piece, right) for piece in left])
    else:
        result = out.new_empty(columns, samples * groups, features, size)
        for piece, target in zip(left, result, strict=True):
            torch.bmm(piece, right, out=target)
    return result.reshape(columns, samples, groups, features, size)


def square_sum(out: Tensor, inp: Tensor) -> Tensor:
    """``Σ_v Σ_n M²``. Shape ``[G, O, I]``."""
    if out.shape[2] == 1:
        left = out.square().sum(0).squeeze(1)  # [N, G, O]
        right = inp.square().squeeze(1)  # [N, G, I]
        return left.permute(1, 2, 0) @ right.permute(1, 0, 2)
    groups, features, size = out.shape[3], out.shape[4], inp.shape[3]
    result = out.new_zeros(groups, features, size)
    for _, piece in pieces(out, inp):
        result += piece.square_().sum((0, 2))
    return result


def per_sample_square_sum(out: Tensor, inp: Tensor) -> Tensor:
    """``Σ_v M²``. Shape ``[N, G, O, I]``."""
    if out.shape[2] == 1:
        left = out.square().sum(0).squeeze(1)
        return left.unsqueeze(-1) * inp.square().squeeze(1).unsqueeze(-2)
    samples, groups, features, size = out.shape[1], out.shape[3], out.shape[4], inp.shape[3]
    result = out.new_zeros(samples, groups, features, size)
    for rows, piece in pieces(out, inp):
        result[rows] += piece.square_().sum(2)
    return result


def squared_norm(out: Tensor, inp: Tensor) -> Tensor:
    """``‖M[v, n]‖²``. Shape ``[V, N]``."""
    columns, samples, positions, _, features = out.shape
    size = inp.shape[3]
    if positions == 1:
        left = out.square().sum(-1).squeeze(2)
        return torch.einsum("vng,ng->vn", left, inp.square().sum(-1).squeeze(1))
    if positions * (features + size) < features * size:
        gram_in = torch.einsum("nsgi,ntgi->ngst", inp, inp)
        gram_out = torch.einsum("vnsgo,vntgo->vngst", out, out)
        return torch.einsum("vngst,ngst->vn", gram_out, gram_in)
    result = out.new_zeros(columns, samples)
    for rows, piece in pieces(out, inp):
        result[:, rows] += piece.square_().sum((1, 3, 4)).T
    return result


def pieces(out: Tensor, inp: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """``M`` as ``[n, G, V, O, I]`` for some samples at a time, small enough for the cache.

    All columns of a sample are one matrix product: ``[V·O, S] @ [S, I]``.
    """
    columns, samples, positions, groups, features = out.shape
    size = inp.shape[-1]
    per_sample = columns * groups * features * size * out.element_size()
    step = max(1, CACHE // per_sample)
    for start in range(0, samples, step):
        rows = slice(start, start + step)
        left = out[:, rows].permute(1, 3, 0, 4, 2).reshape(-1, columns * features, positions)
        right = inp[rows].permute(0, 2, 1, 3).reshape(-1, positions, size)
        product = torch.bmm(left, right)
        yield rows, product.reshape(-1, groups, columns, features, size)
