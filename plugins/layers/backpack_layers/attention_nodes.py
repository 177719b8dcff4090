"""The autograd nodes inside attention: the tensors they saved, and where gradients arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from backpack_core.record.call import Call
from backpack_core.record.view import View
from backpack_operations.order import children_of, reached
from backpack_products.some_samples import saved_in


def kept_by_kernel(view: View, names: Sequence[str], kernel: str = "") -> list[Tensor] | None:
    """The tensors that a fused kernel saved; ``None`` without a kernel, or if one is missing."""
    node = None if view.node is None else _kernel(view.call, view.node)
    if node is None or view.is_differentiable or not node.name().startswith(kernel):
        return None
    saved = [kept for name in names if (kept := saved_in(view, name, node)) is not None]
    return saved if len(saved) == len(names) else None


def _kernel(call: Call, node: Node) -> Node | None:
    """The node of a fused kernel behind that of an output."""
    nodes = _inside(call, node)
    return next((found for found in nodes if found.name().startswith("ScaledDotProduct")), None)


def _inside(call: Call, node: Node) -> Iterator[Node]:
    """The nodes that a call made, from that of an output on."""
    ends = {edge.node for edge in call.edges if edge is not None}
    return reached([node], lambda this: [n for n in children_of(this) if n not in ends])


def _transposed(node: Node) -> Node | None:
    """The operand of a node that transposes; ``None`` for other nodes."""
    return node.next_functions[0][0] if node.name() == "TBackward0" else None


def projection(view: View, weight: str, bias: str) -> Node | None:
    """The first node, from the output on, that uses the weight or the bias of a projection.

    The bias is added after the product, or by the same node. ``None`` if the parameter was
    converted before its use, for instance by autocast: what arrives there is already summed over
    samples.
    """
    owned = view.stored.owned
    names = [name for name in (bias, weight) if name in owned and owned[name][0].requires_grad]
    if view.node is None or not names:
        return None
    leaf, is_weight = get_gradient_edge(owned[names[0]][0]).node, names[0] == weight
    for node in _inside(view.call, view.node):
        children = [child for child, _ in node.next_functions]
        for child in children if len(children) > 1 else ():
            if child is leaf or (is_weight and child is not None and _transposed(child) is leaf):
                return node
    return None
