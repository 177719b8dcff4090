"""A root of the Hessian of the softmax cross-entropy, with as many columns as it has rank."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor


def softmax_root(logits: Tensor, factor: Tensor) -> Tensor:
    """Columns ``S`` with ``Σ_v S_v S_vᵀ = factor² (diag p - p pᵀ)``, ``p = softmax(logits)``.

    The matrix has rank ``C - 1``. With classes numbered by falling probability, and ``t_v = Σ_{j ≥
    v} p_j``, its factorisation ``L D Lᵀ`` is known:

        S[v, v] = √(p_v t_{v+1} / t_v),    S[v, j] = -p_j √(p_v / (t_v t_{v+1}))  for j > v.

    All terms of a sum have the same sign, so every entry is as exact as ``p``, for any order of the
    classes. In this order, the remainder after ``m`` columns has a trace of at most ``t_m``. The
    best ``m - 1`` columns leave no less, because the matrix's eigenvalues interlace with ``p``.

    Args:
        logits: Shape ``[N, C, S]``.
        factor: Shape ``[N, 1, S]``.

    Returns:
        Shape ``[C - 1, N, C, S]``; a column of zeros for one class. At least in single precision.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = logits.log_softmax(1, dtype=dtype)
    classes = log_p.shape[1]
    if classes == 1:
        return log_p.unsqueeze(0) * factor  # zeros, unless a number is not finite
    # Below this bound p underflows anyway; the bound keeps logarithms of sums finite.
    log_p = log_p.clamp(min=4 * log(torch.finfo(dtype).tiny))
    ordered, order = log_p.sort(1, descending=True)
    tails = ordered.flip(1).logcumsumexp(1).flip(1)
    here, behind, first = tails[:, :-1], tails[:, 1:], ordered[:, :-1]
    # Halved logarithms instead of roots: their derivative is finite where p underflows. Where the
    # bound is reached, the probabilities that multiply it have underflowed, too.
    bound = log(torch.finfo(dtype).max) / 2
    share = ((first - here - behind) / 2).clamp(max=bound).exp() * factor
    # The rank of each class, as numbers of the dtype: comparisons of integers take longer.
    turn = torch.arange(classes, device=order.device, dtype=dtype)
    rank = torch.empty_like(ordered).scatter_(1, order, turn[:, None].expand_as(order))
    is_behind = (rank - turn[:-1, None, None, None]).clamp_(0, 1)  # one where j > v, else zero
    root = is_behind.mul_(_columns(-share)).mul_(log_p.exp())
    return root.scatter_(2, _columns(order[:, :-1]), _columns(share * behind.exp()))


def _columns(numbers: Tensor) -> Tensor:
    """``[N, V, S] → [V, N, 1, S]``, contiguous, so that what it multiplies is, too."""
    return numbers.transpose(0, 1).contiguous().unsqueeze(2)
