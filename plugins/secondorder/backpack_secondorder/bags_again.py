"""The gradient of bags of looked-up rows by its plain formula, which can be differentiated again.

Torch has no second derivative of ``EmbeddingBag``. With the rows ``i`` of bag ``b(i)``, the
gradient ``g`` at the output and the weights ``w`` of rows, the gradient of the table is

    Σ_i w_i g_b(i)  at row ``i``,  and  ∂ℓ/∂w_i = ⟨table_i, g_b(i)⟩,

where ``w_i`` is one over the number of rows for a mean. A maximum hands each entry of ``g`` to the
row that it came from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]


def of_bags(node: Any, arrived: Tensor | None, *others: Tensor | None) -> Grads:
    """The gradients of a table, and of the weights of rows if there are any.

    Args:
        node: The node, with the tensors that it saved.
        arrived: The gradient at its output, ``[B, dim]``.
        others: The gradients at its further outputs, which are not used.
    """
    table, *rest = (edge is not None for edge, _ in node.next_functions)
    if arrived is None:
        return (None,) * len(node.next_functions)
    index, offsets = node._saved_indices, node._saved_offsets
    place = torch.arange(len(index), device=index.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets, place, right=True) - 1
    counts = (bag < len(arrived)) & (index != node._saved_padding_idx)  # the rest is in no bag
    index, bag = index[counts], bag[counts]
    sizes = bag.new_zeros(len(arrived)).index_add(0, bag, torch.ones_like(bag))
    zeros = arrived.new_zeros(int(node._saved_weight_sym_argsize_0), arrived.shape[1])
    if node._saved_mode == 2:
        filled = arrived * (sizes > 0).unsqueeze(1)
        return zeros.scatter_add(0, node._saved_result3.long(), filled), *(None for _ in rest)
    rows = arrived[bag]
    if node._saved_mode == 1:
        rows = rows / sizes[bag].unsqueeze(1)
    weights, of_weights = node._saved_per_sample_weights, None
    if weights is not None:
        if any(rest):
            found = (node._saved_weight[index] * rows).sum(1)
            of_weights = torch.zeros_like(weights).masked_scatter(counts, found)
        rows = rows * weights[counts].unsqueeze(1)
    return zeros.index_add(0, index, rows) if table else None, *(of_weights for _ in rest)
