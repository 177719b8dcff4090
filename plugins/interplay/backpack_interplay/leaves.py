"""The leaves that a parameter was computed from, and columns at these leaves.

Parametrizations and forward pre-hooks compute parameters. Such a computation does not depend on
samples, so the columns of all samples go through its nodes together.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import is_leaf
from backpack_core.record.call import Edge, edge_of
from backpack_operations import bridge, nodes
from backpack_operations._torch import will_get_gradient
from backpack_operations.order import ranks
from backpack_operations.own_pass import in_own_pass


def leaves_behind(tensor: Tensor) -> tuple[Tensor, ...]:
    """The leaves that require a gradient and that a tensor was computed from."""
    edge = edge_of(tensor)
    if edge is None:
        return (tensor,) if tensor.requires_grad else ()
    return tuple(n.variable for n in ranks(edge.node) if is_leaf(n))  # type: ignore[attr-defined]


def pull_back(mat: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
    """Carry columns at a tensor back to a leaf that it was computed from.

    Args:
        mat: Columns ``[K, *source]``.
        source: The tensor.
        leaf: One of its :func:`leaves_behind`.

    Returns:
        Shape ``[K, *leaf]``.

    Raises:
        BridgeError: A node on the way cannot be called for columns.
    """
    edge = edge_of(source)
    if edge is None:
        return mat
    if will_get_gradient(leaf):
        return _pulled(mat, edge, leaf)
    return in_own_pass(partial(_pulled, mat, edge, leaf), mat.device)


def nonlinear_between(source: Tensor, leaf: Tensor) -> list[Node]:
    """The operations between a leaf and a tensor that are not known to be linear."""
    edge = edge_of(source)
    between = [*ranks(edge.node)] if edge is not None else []
    leads = {n for n in between if is_leaf(n) and n.variable is leaf}  # type: ignore[attr-defined]
    for node in reversed(between):  # operands first
        if any(child in leads for child, _ in node.next_functions):
            leads.add(node)
    on_the_way = (node for node in between if node in leads and not is_leaf(node))
    return [node for node in on_the_way if not nodes.is_linear(node, leads)]


def _pulled(mat: Tensor, edge: Edge, leaf: Tensor) -> Tensor:
    """Columns at a leaf, pushed from node to node; zero if the leaf is not reached."""
    mats = bridge.push_through(ranks(edge.node), {(edge.node, edge.output_nr): mat})
    at_leaf = (m for (node, _), m in mats.items() if node.variable is leaf)  # type: ignore[attr-defined]
    return next(at_leaf, mat.new_zeros(len(mat), *leaf.shape))
