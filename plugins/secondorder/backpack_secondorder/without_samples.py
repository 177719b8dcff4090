"""Where the Hessian is carried to tensors that no sample has a part in, and where it is not.

A table of positions, or a parameter that a function uses, gets columns of every sample apart. On
the way there, what is nonlinear couples operands: what that adds to a block of the diagonal is
nothing, where the operation is a product and its factors have no parameter in common.
"""

from __future__ import annotations

from torch.autograd.graph import Node

from backpack_core import View
from backpack_core.errors import UnsupportedError
from backpack_core.graph import nodes
from backpack_core.graph.alignment import Crossing
from backpack_core.graph.order import children_of, reached
from backpack_secondorder.hessian import Hessian

_INSTEAD = (
    "Use DiagHMP, which takes a product for every entry, or the generalised Gauss-Newton matrix "
    "(DiagGGNExact)."
)


def couples_nothing(node: Node, there: Crossing, is_apart: bool) -> bool:
    """Whether an operation adds nothing to a block of the diagonal, as far as samples are apart.

    Args:
        node: The operation.
        there: Where samples lie.
        is_apart: Whether what arrives is that of every sample apart.

    Returns:
        False where nothing is apart, and the residual is as everywhere.

    Raises:
        BridgeError: It is nonlinear, and no product of tensors without a parameter in common.
    """
    if not (is_apart or there.apart):
        return False
    operation = nodes.operation_of(node)
    if operation in nodes.LINEAR or nodes.hands_on(node):
        return True
    if operation in nodes.PIECEWISE_LINEAR and nodes.is_linear(node):
        return True
    behind = [child for child, _ in node.next_functions]
    if operation in nodes.QUOTIENTS and not any(child is not None for child in behind[1:]):
        return True
    if operation not in nodes.FACTORS:
        raise nodes.refuse(
            node,
            "it is nonlinear, and works on a parameter or on a tensor without samples",
            _INSTEAD,
        )
    factors = [behind[p] for p in nodes.FACTORS[operation] if p < len(behind)]
    leaves = [{*_leaves(child)} for child in factors if child is not None]
    if len(leaves) > 1 and not leaves[0].isdisjoint(leaves[1]):
        raise nodes.refuse(
            node,
            "it multiplies a tensor without samples with one that depends on the same parameter, "
            "so the loss has second derivatives in both together, which are not carried",
            _INSTEAD,
        )
    return True


def _leaves(node: Node) -> list[Node]:
    return [found for found in reached([node], children_of) if nodes.is_leaf(found)]


def require_one_entry(view: View, quantity: Hessian, what: str) -> None:
    """Raise where a call has no samples on axis 0, or several entries of each.

    Raises:
        UnsupportedError: It does.
    """
    if view.positions != 1 or quantity.is_apart:
        raise UnsupportedError(
            f"The Hessian at {view.path} needs samples on axis 0, one entry each, where {what}: "
            f"keep positions as an extra dimension, [N, T, D]. {_INSTEAD}"
        )
