"""Columns through kernels that vmap would call once for each.

``torch.vmap`` has no rule for the backward of some fused kernels, and falls back to a loop. Fused
attention on a CPU takes columns as further samples, so that one call carries as many as fit into
the budget. Weight normalisation has a formula of few operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.tuning import memory_budget
from backpack_operations import nodes
from backpack_products.contractions import slices


def of_columns(node: Node, mats: dict[int, Tensor]) -> dict[int, Tensor] | None:
    """What a fused kernel sends back for columns.

    Args:
        node: An autograd node.
        mats: Columns ``[V, *shape]`` at its outputs, by output number.

    Returns:
        Columns by position in ``node.next_functions``; ``None`` for all other nodes, and where a
        derivative of the result is asked for that the kernel does not have.
    """
    operation = nodes.operation_of(node)
    if operation not in _KERNELS or [*mats] != [0]:
        return None
    found = _KERNELS[operation](node, mats[0])
    if found is None:
        return None
    return {i: mat for i, mat in enumerate(found) if node.next_functions[i][0] is not None}


def weight_norm(node: Any, mat: Tensor) -> list[Tensor]:
    """For columns ``[V, *w]`` at ``w = g v / |v|``, those at ``v`` and at ``g``.

    Torch's own backward takes the norm for a constant when it is differentiated again.
    """
    v, g = node._saved_v, node._saved_g
    axes = [axis for axis in range(v.dim()) if axis != node._saved_dim]
    norm = torch.linalg.vector_norm(v, dim=axes, keepdim=True)
    along = (mat * v).sum([axis + 1 for axis in axes], keepdim=True) / norm
    return [g / norm * (mat - v / norm * along), along]


def _attention(node: Node, mat: Tensor) -> list[Tensor] | None:
    """For columns ``[V, N, H, L, E]``, those at query, key and value."""
    if len(mat) < 2 or (torch.is_grad_enabled() and mat.requires_grad):
        return None
    # Query, key, value and output are repeated beside each piece of columns.
    few = max(1, memory_budget() // max(1, 8 * mat[:1].nbytes))
    parts = [_attended(node, mat[some]) for some in slices(len(mat), few)]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _attended(node: Any, mat: Tensor) -> list[Tensor]:
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


_KERNELS = {
    "ScaledDotProductFlashAttentionForCpu": _attention,
    "WeightNormInterface": weight_norm,
}
