"""Columns through fused attention on a CPU, many in one call of its backward kernel.

``torch.vmap`` has no rule for this kernel, and falls back to a loop over columns. The kernel's
batch axis can hold columns as well as samples: ``[V · N, H, L, E]``.
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


def fused_product(node: Node, mats: dict[int, Tensor]) -> dict[int, Tensor] | None:
    """The vector-Jacobian products of a fused kernel.

    Args:
        node: An autograd node.
        mats: Columns ``[V, *shape]`` at its outputs, by output number.

    Returns:
        Columns by position in ``node.next_functions``; ``None`` for all other nodes, and if the
        result has to be differentiable, which the kernel is not.
    """
    if nodes.operation_of(node) != _ATTENTION or [*mats] != [0] or len(mats[0]) < 2:
        return None
    if torch.is_grad_enabled() and mats[0].requires_grad:
        return None
    # Each chunk of columns also needs copies of query, key, value and output, and their gradients.
    few = max(1, memory_budget() // max(1, 8 * mats[0][:1].nbytes))
    parts = [_attention(node, mats[0][some]) for some in slices(len(mats[0]), few)]
    sent = (torch.cat(part) for part in zip(*parts, strict=True))
    return {i: mat for i, mat in enumerate(sent) if node.next_functions[i][0] is not None}


def _attention(node: Any, mat: Tensor) -> list[Tensor]:
    """Columns at query, key and value, from columns ``[V, N, H, L, E]`` at the output."""
    columns = len(mat)

    def repeated(saved: Tensor) -> Tensor:
        return saved.expand(columns, *saved.shape).flatten(0, 1)

    names = ("query", "key", "value", "output", "logsumexp")
    inputs = [repeated(getattr(node, f"_saved_{name}")) for name in names]
    mask = node._saved_attn_mask
    if mask is not None and mask.dim() == 4 and len(mask) > 1:
        mask = repeated(mask)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    options = node._saved_dropout_p, node._saved_is_causal
    grads = backward(mat.flatten(0, 1), *inputs, *options, attn_mask=mask, scale=node._saved_scale)
    return [each.unflatten(0, (columns, -1)) for each in grads]
