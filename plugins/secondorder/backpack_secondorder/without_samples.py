"""Decides whether the Hessian can be carried to tensors without samples.

At a table of positions, or a parameter that a function uses, columns are kept apart by sample. On
the way there, nonlinear operations couple their operands. This does not change a diagonal block if
the operation is a product and its factors have no common parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.autograd.graph import Node

from backpack_core import View
from backpack_core.errors import UnsupportedError
from backpack_core.graph import is_leaf, refuse
from backpack_operations import nodes
from backpack_operations.alignment import Crossing
from backpack_operations.order import children_of, reached
from backpack_products.columns import Root
from backpack_secondorder.hessian import Hessian

_INSTEAD = (
    "Use DiagHMP, which takes a product for every entry, or the generalised Gauss-Newton matrix "
    "(DiagGGNExact)."
)


@dataclass(frozen=True, eq=False, repr=False)
class Missing(Root):
    """The root of a column of zeros, which marks parameters with a missing part.

    Attributes:
        why: The error message.
        parameters: The parameters, by ``id``.
    """

    why: str = ""
    parameters: frozenset[int] = frozenset()

    @classmethod
    def of(cls, error: UnsupportedError, leaves: Iterable[Node]) -> Missing:
        """The root for the parameters of some leaves."""
        parameters = frozenset(id(leaf.variable) for leaf in leaves)  # type: ignore[attr-defined]
        return cls("missing", why=str(error), parameters=parameters)

    def beside(self, quantity: Hessian) -> Hessian:
        """Add the column of zeros to a quantity at a call.

        Raises:
            UnsupportedError: The quantity has no columns.
        """
        if quantity.columns is None:
            raise UnsupportedError(self.why)
        first = next(iter(quantity.columns.blocks.values()))
        zeros = quantity.columns.like({self: first.new_zeros(1, *first.shape[1:])})
        branched = quantity.branched | {self}
        return replace(quantity, columns=quantity.columns.merge(zeros), branched=branched)


def coupled(node: Node) -> set[Node]:
    """The leaves that an operation may have a second derivative in.

    For a product, these are the leaves that both factors depend on, so none if one factor is
    constant. For a quotient, they are the leaves of the denominator; otherwise all leaves behind
    the operation.
    """
    operation, behind = nodes.operation_of(node), [child for child, _ in node.next_functions]
    positions = nodes.FACTORS.get(operation)
    if positions is None:
        starts = behind[1:] if operation in nodes.QUOTIENTS else behind
        return {*_leaves([child for child in starts if child is not None])}
    factors = [behind[p] for p in positions if p < len(behind)]
    leaves = [{*_leaves([child])} for child in factors if child is not None]
    return leaves[0] & leaves[1] if len(leaves) > 1 else set()


def leaves_behind(view: View) -> list[Node]:
    """The leaves behind the inputs of a call."""
    return _leaves([edge.node for edge in view.call.edges if edge is not None])


def couples_nothing(node: Node, there: Crossing, is_apart: bool) -> bool:
    """Whether an operation leaves a diagonal block unchanged, because columns are kept apart.

    Args:
        node: The operation.
        there: Where samples lie.
        is_apart: Whether the arriving columns are kept apart by sample.

    Returns:
        False if the usual residual applies. This is so if columns are not kept apart. It is also so
        for a single sample, since autograd has its gradient, if no operand is a leaf (a residual
        treats leaves as constants).

    Raises:
        BridgeError: The operation is nonlinear, and is not a product of factors without a common
            parameter.
    """
    if not (is_apart or there.apart):
        return False
    operation, behind = nodes.operation_of(node), [child for child, _ in node.next_functions]
    if there.batch_size == 1 and not any(child is not None and is_leaf(child) for child in behind):
        return False
    if operation in nodes.LINEAR or nodes.hands_on(node):
        return True
    if operation in nodes.PIECEWISE_LINEAR and nodes.is_linear(node):
        return True
    if operation in nodes.QUOTIENTS and not any(child is not None for child in behind[1:]):
        return True
    if operation not in nodes.FACTORS:
        raise refuse(
            node,
            "it is nonlinear, and has an operand that is a parameter or a tensor without samples",
            _INSTEAD,
        )
    if coupled(node):
        raise refuse(
            node,
            "both of its factors depend on one parameter (the model returns a derivative of "
            "itself by torch.autograd.grad(..., create_graph=True), or a weight is tied), and the "
            "mixed second derivative is not carried",
            _INSTEAD,
        )
    return True


def _leaves(starts: list[Node]) -> list[Node]:
    return [node for node in reached(starts, children_of) if is_leaf(node)]


def needs_samples(view: View, what: str) -> UnsupportedError:
    """The error for a call without samples on axis 0, or with samples in another order."""
    return UnsupportedError(
        f"The Hessian at {view.path} needs samples on axis 0, one after the other, since {what}: "
        "keep positions as an extra dimension, [N, T, D], and leave out samples=... of "
        f"backpack(...), if you passed it. {_INSTEAD}"
    )
