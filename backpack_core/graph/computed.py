"""Parameters that are computed from others: by a parametrization, or in a hook before the forward.

What depends on no sample is a function of leaves alone, so columns of any number of samples go
through its nodes side by side.
"""

from __future__ import annotations

from torch import Tensor

from backpack_core._torch import ACCUMULATE, Node
from backpack_core.graph import bridge
from backpack_core.graph.order import ranks
from backpack_core.record.call import edge_of


def leaves_behind(tensor: Tensor) -> tuple[Tensor, ...]:
    """The leaves that a tensor was computed from, and that require a gradient."""
    edge = edge_of(tensor)
    if edge is None:
        return (tensor,) if tensor.requires_grad else ()
    return tuple(n.variable for n in ranks(edge.node) if n.name() == ACCUMULATE)  # type: ignore[attr-defined]


def pull_back(mat: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
    """Columns at a leaf, from columns at a tensor that was computed from it.

    Args:
        mat: Shape ``[K, *source]``.
        source: The tensor.
        leaf: One of :func:`leaves_behind` it.

    Returns:
        Shape ``[K, *leaf]``.

    Raises:
        BridgeError: An operation on the way cannot be called for columns.
    """
    edge = edge_of(source)
    if edge is None:
        return mat
    waiting: dict[Node, dict[int, Tensor]] = {edge.node: {edge.output_nr: mat}}
    for node in ranks(edge.node):  # in this order
        arrived = waiting.pop(node, {})
        if node.name() == ACCUMULATE:
            if arrived and node.variable is leaf:  # type: ignore[attr-defined]
                return arrived[0]
            continue
        for position, product in bridge.push(node, arrived).items() if arrived else ():
            child, number = node.next_functions[position]
            assert child is not None
            there = waiting.setdefault(child, {})
            there[number] = there[number] + product if number in there else product
    return mat.new_zeros(len(mat), *leaf.shape)
