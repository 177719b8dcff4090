"""Inner products of pairs of products, from factors as in ``contractions``."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.contract.contractions import is_empty, products, row_steps
from backpack_core.contract.rows import Rows
from backpack_core.tuning import memory_budget


def gram(out: Tensor, inp: Rows) -> Tensor:
    """``⟨M[v, n], M[w, m]⟩``, without ``M`` where that is cheaper. Shape ``[V, N, V, N]``."""
    columns, samples, positions, groups, features = out.shape
    size, count = inp.shape[3], columns * samples
    if is_empty(out, inp):
        return out.new_zeros(columns, samples, columns, samples)
    rows, pairs = samples * positions, (count * positions) ** 2
    is_cheaper = pairs * features + rows**2 * size <= count * features * size * (positions + count)
    if is_cheaper and pairs * out.element_size() <= memory_budget():
        return _gram_by_positions(out, inp[:])
    total = out.new_zeros(count, count)
    step = max(1, memory_budget() // (count * groups * size * out.element_size()))
    for start in range(0, features, step):
        some = products(out[..., start : start + step], inp).flatten(0, 1).flatten(1)
        total = torch.addmm(total, some, some.T)
    return total.reshape(columns, samples, columns, samples)


def inner(out: Tensor, inp: Rows, other_out: Tensor, other_inp: Rows) -> Tensor:
    """``Σ_s Σ_t ⟨out_s, out'_t⟩ ⟨inp_s, inp'_t⟩`` of two products of one form. Shape ``[V, N]``."""
    if is_empty(out, inp) or is_empty(other_out, other_inp):
        return out.new_zeros(out.shape[:2])
    parts = []
    for rows in row_steps(inp, out.element_size()):
        right = inp[rows].transpose(1, 2) @ other_inp[rows].permute(0, 2, 3, 1)  # [n, G, S, T]
        left, other = out[:, rows].transpose(2, 3), other_out[:, rows].transpose(2, 3)
        parts.append(
            torch.stack(
                [((x @ y.mT) * right).sum((1, 2, 3)) for x, y in zip(left, other, strict=True)]
            )
        )
    return torch.cat(parts, 1)


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
