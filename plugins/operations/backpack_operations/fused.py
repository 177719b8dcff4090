"""Columns through fused kernels, for which vmap has no rule and would loop over columns.

The backward kernel of fused attention on a CPU takes columns as further samples,
``[V · N, H, L, E]``, as many in one call as fit into memory. Weight normalisation, and attention of
cuDNN on a GPU, are written as formulas of few operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_operations import nodes
from backpack_products.contractions import slices
from backpack_products.tuning import memory_budget


def fused_product(
    node: Node, mats: dict[int, Tensor], wanted: Collection[int] | None = None
) -> dict[int, Tensor] | None:
    """The vector-Jacobian products of a fused kernel, or those at one factor of a product.

    Args:
        node: An autograd node.
        mats: Columns ``[V, *shape]`` at its outputs, by output number.
        wanted: The positions that are asked for; default: all.

    Returns:
        Columns by position in ``node.next_functions``; ``None`` for all other nodes, and if the
        result must be differentiable, but the kernel is not.
    """
    operation = nodes.operation_of(node)
    if wanted is not None and operation in _FIRST_FACTORS:
        position, formula = _FIRST_FACTORS[operation]
        product = formula(node, mats[0]) if [*wanted] == [position] else None
        return None if product is None else {position: product}
    if operation not in _KERNELS or [*mats] != [0]:
        return None
    sent = _KERNELS[operation](node, mats[0])
    if sent is None:
        return None
    return {i: mat for i, mat in enumerate(sent) if node.next_functions[i][0] is not None}


def _of_matrices(node: Any, mat: Tensor) -> Tensor | None:
    """Columns at ``a`` from ``[V, *, N, O]`` at ``a b``; the node would also multiply for ``b``."""
    other, alpha = node._saved_mat2, getattr(node, "_saved_alpha", 1)
    if mat.is_complex() or other.layout is not torch.strided or other.dtype is not mat.dtype:
        return None
    product: Tensor = mat @ other.mT
    return product if alpha == 1 else product * alpha


def _of_convolution(node: Any, mat: Tensor) -> Tensor | None:
    """Columns at the input, with columns as further samples; not at the kernel as well."""
    x, weight = node._saved_input, node._saved_weight
    if mat.is_complex() or x.is_mkldnn or not mat.numel():
        return None
    folded = mat.flatten(0, 1)
    blank = x.new_empty(len(folded), *x.shape[1:])  # only its shape counts
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = [getattr(node, f"_saved_{name}") for name in names]
    backward = torch.ops.aten.convolution_backward
    found = backward(folded, blank, weight, None, *settings, [True, False, False])[0]
    product: Tensor = found.unflatten(0, mat.shape[:2])
    return product


def weight_norm(node: Any, mat: Tensor) -> list[Tensor]:
    """Columns at ``v`` and at ``g``, from columns ``[V, *w]`` at ``w = g v / |v|``.

    Torch's own backward treats the norm as a constant when it is differentiated again. Otherwise
    the norm is the one that torch divided by: on a GPU it has single precision for any weight.
    """
    v, g = node._saved_v, node._saved_g
    axes = [axis for axis in range(v.dim()) if axis != node._saved_dim]
    if torch.is_grad_enabled():
        norm = torch.linalg.vector_norm(v, dim=axes, keepdim=True)
    else:
        norm = node._saved_result1.to(v.dtype)
    along = (mat * v).sum([axis + 1 for axis in axes], keepdim=True) / norm
    return [g / norm * (mat - v / norm * along), along]


def _attention(node: Node, mat: Tensor) -> list[Tensor] | None:
    """Columns at query, key and value, from columns ``[V, N, H, L, E]`` at the output."""
    if len(mat) < 2 or (torch.is_grad_enabled() and mat.requires_grad):
        return None
    # Each chunk of columns also needs copies of query, key, value and output, and their gradients.
    few = max(1, memory_budget() // max(1, 8 * mat[:1].nbytes))
    parts = [_by_kernel(node, mat[some]) for some in slices(len(mat), few)]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _by_kernel(node: Any, mat: Tensor) -> list[Tensor]:
    """The same for a chunk of columns, by one call of the kernel."""
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


def attention_by_formula(node: Any, mat: Tensor) -> list[Tensor] | None:
    """With ``P`` the softmax: ``Pᵀ g`` at the value, and ``P ∘ (g vᵀ - rowsum(P ∘ g vᵀ))`` between.

    The backward kernel of cuDNN is left to autograd. Torch keeps a plan of it for the shapes and
    strides of query, key and value. It takes that plan for a gradient with other strides, too, and
    then computes something else, after our call also for ``.grad``.
    """
    if node._saved_dropout_p:
        return None
    dtype = torch.promote_types(mat.dtype, torch.float32)
    query, key, value = (getattr(node, f"_saved_{n}").to(dtype) for n in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if node._saved_scale is None else node._saved_scale
    scores = query @ key.mT * scale
    bias = getattr(node, "_saved_attn_bias", getattr(node, "_saved_attn_mask", None))
    if bias is not None:
        scores = scores + bias
    if node._saved_is_causal:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    weights, parts = scores.softmax(-1), []
    for some in slices(len(mat), memory_budget() // max(1, 4 * weights.nbytes)):
        columns = mat[some].to(dtype)
        along = columns @ value.mT
        between = scale * weights * (along - (weights * along).sum(-1, keepdim=True))
        parts.append((between @ key, between.mT @ query, weights.mT @ columns))
    sent = [torch.cat(part).to(mat.dtype) for part in zip(*parts, strict=True)]
    return [sent[0], *(t.unflatten(2, (-1, groups)).sum(3) for t in sent[1:])]


_KERNELS = {
    "ScaledDotProductFlashAttentionForCpu": _attention,
    "ScaledDotProductCudnnAttention": attention_by_formula,
    "WeightNormInterface": weight_norm,
}
# The position of an operand that has the samples as a rule, and columns there alone.
_FIRST_FACTORS: dict[str, tuple[int, Callable[[Any, Tensor], Tensor | None]]] = {
    "Mm": (0, _of_matrices),
    "Bmm": (0, _of_matrices),
    "Addmm": (1, _of_matrices),
    "Convolution": (0, _of_convolution),
}
