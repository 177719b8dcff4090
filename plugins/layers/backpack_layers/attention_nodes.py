"""The nodes of autograd inside of attention: what they keep, and where gradients arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from backpack_core.record.call import Call
from backpack_core.record.view import View


def kept_by_kernel(view: View, names: Sequence[str], kernel: str = "") -> list[Tensor] | None:
    """What a fused kernel kept, one of a name or any; ``None`` if something of it is missing."""
    node = None if view.node is None else _kernel(view.call, view.node)
    if node is None or view.is_differentiable or not node.name().startswith(kernel):
        return None
    found = [kept for name in names if (kept := view.saved(name, node)) is not None]
    return found if len(found) == len(names) else None


def _kernel(call: Call, node: Node) -> Node | None:
    """The node of a fused kernel next to that of an output."""
    nodes = _inside(call, node)
    return next((found for found in nodes if found.name().startswith("ScaledDotProduct")), None)


def _inside(call: Call, node: Node) -> Iterator[Node]:
    """The nodes that a call made, from that of an output on."""
    seen = {edge.node for edge in call.edges if edge is not None}
    found = [node]
    for node in found:
        yield node
        new = dict.fromkeys(n for n, _ in node.next_functions if n is not None and n not in seen)
        seen.update(new)
        found += new


def _transposed(node: Node) -> Node | None:
    """What a node transposes, if it does."""
    return node.next_functions[0][0] if node.name() == "TBackward0" else None


def projection(view: View, names: Sequence[str]) -> Node | None:
    """The first node that wants a gradient of some parameters, on the way from the output."""
    if view.node is None:
        return None
    params = [view.stored.owned[name][0] for name in names if name in view.stored.owned]
    leaves = {get_gradient_edge(p).node for p in params if p.requires_grad}
    for node in _inside(view.call, view.node):
        for child, _ in node.next_functions:
            if child in leaves or (child is not None and _transposed(child) in leaves):
                return node
    return None
