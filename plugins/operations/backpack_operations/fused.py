"""Columns through kernels that vmap would call once for each: they take columns for samples.

``torch.vmap`` has no rule for the backward of fused attention on a CPU, and falls back to a loop.
Its batch axis will hold columns as well, so that one call carries as many as fit into the budget.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.tuning import memory_budget
from backpack_operations import nodes
from backpack_products.contractions import slices

_ATTENTION = "ScaledDotProductFlashAttentionForCpu"


def of_columns(node: Node, mats: dict[int, Tensor]) -> dict[int, Tensor] | None:
    """What a fused kernel sends back for columns.

    Args:
        node: An autograd node.
        mats: Columns ``[V, *shape]`` at its outputs, by output number.

    Returns:
        Columns by position in ``node.next_functions``; ``None`` for all other nodes, and where a
        derivative of the result is asked for, which the kernel has not.
    """
    if nodes.operation_of(node) != _ATTENTION or [*mats] != [0] or len(mats[0]) < 2:
        return None
    if torch.is_grad_enabled() and mats[0].requires_grad:
        return None
    # Query, key, value and output are repeated beside each piece of columns.
    few = max(1, memory_budget() // max(1, 8 * mats[0][:1].nbytes))
    parts = [_attention(node, mats[0][some]) for some in slices(len(mats[0]), few)]
    found = (torch.cat(part) for part in zip(*parts, strict=True))
    return {i: mat for i, mat in enumerate(found) if node.next_functions[i][0] is not None}


def _attention(node: Any, mat: Tensor) -> list[Tensor]:
    """For columns ``[V, N, H, L, E]``, those at query, key and value."""
    columns = len(mat)

    def repeated(kept: Tensor) -> Tensor:
        return kept.expand(columns, *kept.shape).flatten(0, 1)

    names = ("query", "key", "value", "output", "logsumexp")
    saved = [repeated(getattr(node, f"_saved_{name}")) for name in names]
    mask = node._saved_attn_mask
    if mask is not None and mask.dim() == 4 and len(mask) > 1:
        mask = repeated(mask)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    options = node._saved_dropout_p, node._saved_is_causal
    found = backward(mat.flatten(0, 1), *saved, *options, attn_mask=mask, scale=node._saved_scale)
    return [each.unflatten(0, (columns, -1)) for each in found]
