"""The gradient of fused attention by its plain formula, which can be differentiated again.

Torch has no second derivative of its fused kernels. With ``P = softmax(s q kᵀ + mask)`` and the
gradient ``g`` at the output ``P v``:

    dv = Pᵀ g,  dS = P ∘ (g vᵀ - rowsum(g ∘ P v)),  dq = s dS k,  dk = s dSᵀ q

from the tensors that the kernel saved. Only the first derivative is formed here; its graph consists
of plain operations. The scores take ``[N, H, L, S]`` numbers, which the fused kernel never forms.
If they exceed the memory budget, the formula is evaluated sample by sample, and each sample is
recomputed when it is differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backpack_core.errors import UnsupportedError
from backpack_products.tuning import memory_budget

NAMES = (
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
)
Grads = tuple[Tensor | None, ...]


def of_fused_attention(node: Any, arrived: Tensor | None, *others: Tensor | None) -> Grads:
    """The gradients of a fused kernel at query, key, value and mask.

    Args:
        node: The node, with the tensors that it saved.
        arrived: The gradient at its output, ``[N, H, L, E]``.
        others: The gradients at the kernel's further outputs, which are not used.

    Raises:
        UnsupportedError: Dropout is on, and the kernel does not show its draws.
    """
    count = len(node.next_functions)
    if arrived is None:
        return (None,) * count
    if node._saved_dropout_p:
        raise UnsupportedError(
            "Fused attention with dropout has no second derivative, since the kernel does not "
            "show its draws. Call model.eval(), or build the model with attention dropout 0."
        )
    query, key, value = node._saved_query, node._saved_key, node._saved_value
    mask = getattr(node, "_saved_attn_mask", None)
    mask = getattr(node, "_saved_attn_bias", None) if mask is None else mask
    if node._saved_is_causal:
        square = query.new_zeros(query.shape[-2], key.shape[-2])
        later = torch.ones_like(square, dtype=torch.bool).triu(1)
        mask = square.masked_fill(later, float("-inf"))
    scale = query.shape[-1] ** -0.5 if node._saved_scale is None else node._saved_scale
    wants_mask = count > 3 and node.next_functions[3][0] is not None
    grads = _in_pieces(arrived, query, key, value, mask, scale)
    dmask = _of_mask(grads[3], mask) if wants_mask and mask is not None else None
    return (*grads[:3], dmask, *(None,) * count)[:count]


def _in_pieces(
    arrived: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """The formula, sample by sample if the scores are large."""
    scores = query.shape[:-1].numel() * key.shape[-2] * query.element_size()
    if 4 * scores <= memory_budget() or len(query) < 2:
        return _formula(arrived, query, key, value, mask, scale)
    pieces = []
    for n in range(len(query)):
        own = mask[n : n + 1] if mask is not None and mask.dim() == 4 and len(mask) > 1 else mask
        parts = (t[n : n + 1] for t in (arrived, query, key, value))
        pieces.append(checkpoint(_formula, *parts, own, scale, use_reentrant=False))
    return tuple(torch.cat(part) for part in zip(*pieces, strict=True))


def _formula(
    arrived: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """``dq``, ``dk``, ``dv`` and ``dS``; several heads of a query may share one of a key."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
        dq, dk, dv, ds = _formula(arrived, query, key, value, mask, scale)
        dk, dv = (part.unflatten(1, (-1, shared)).sum(2) for part in (dk, dv))
        return dq, dk, dv, ds
    chances = _softmax(query @ key.mT * scale, mask)
    sent = arrived @ value.mT
    ds = chances * (sent - (sent * chances).sum(-1, keepdim=True))
    return scale * (ds @ key), scale * (ds.mT @ query), chances.mT @ arrived, ds


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax of scores; rows that are fully masked are zero, as in the kernels."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, float("-inf"))
    masked = scores + mask
    empty = (masked == float("-inf")).all(-1, keepdim=True)
    return masked.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def _of_mask(ds: Tensor, mask: Tensor) -> Tensor:
    """Sum a gradient over the axes along which the mask was broadcast."""
    return ds.sum_to_size(mask.shape)
