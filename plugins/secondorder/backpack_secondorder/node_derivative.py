"""The second derivative of an operation between modules, with all mixed terms.

For ``y = f(x_1, x_2, …)`` the residual is ``R_ij = Σ_o ∂ℓ/∂y_o ∂²f_o/∂x_i∂x_j``. Autograd's
backward formula gives ``∂ℓ/∂x_i`` as a function of the saved tensors, which are operands or ``y``.
So the derivative of the formula is ``R``. It is taken node by node, because one operand may depend
on another, and ``torch.autograd.grad`` would differentiate through that, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack_core.graph import is_leaf, refuse
from backpack_core.record.call import Edge, site_at
from backpack_core.record.view import View
from backpack_operations import bridge, nodes
from backpack_operations.nodes import NodeOutput
from backpack_operations.order import consumers_first, reached
from backpack_operations.own_pass import beside_pass
from backpack_secondorder.torch_errors import explained


class SecondDerivative:
    """``v ↦ R v`` at an autograd node, for columns ``v`` at the operands.

    Attributes:
        node: The node.
        positions: The position of each operand in ``node.next_functions``; leaves are constants.
        is_complex: Whether complex numbers occur: the formula above fails for them.
    """

    def __init__(self, node: Node, grads: Sequence[Tensor | None]) -> None:
        """Run the node's backward formula with a graph.

        Raises:
            BridgeError: The formula depends on more than the operands and the result.
        """
        self.node = node
        with torch.enable_grad():
            gradients = bridge.call(node, grads)
        self.is_complex = any(
            t.is_complex() for t in (*gradients.values(), *grads) if t is not None
        )
        self._gradients = {i: t for i, t in gradients.items() if t.grad_fn is not None}
        self._ends = {_place(node, i) for i, (child, _) in enumerate(node.next_functions) if child}
        self.positions: dict[NodeOutput, list[int]] = {}
        for i, (child, _) in enumerate(node.next_functions):
            if child is not None and not is_leaf(child):
                self.positions.setdefault(_place(node, i), []).append(i)
        # With create_graph=True, the gradients have their own graph.
        self._stops: set[Any] = self._ends | {
            (g.grad_fn, g.output_nr) for g in grads if g is not None
        }
        self._order = self._consumers_first()

    @property
    def is_zero(self) -> bool:
        """Whether the operation is linear: its formula does not depend on an operand."""
        return not self._gradients

    def like(self, place: NodeOutput) -> Tensor:
        """A zero expanded to the shape of an operand, so it takes almost no memory."""
        (first, *_) = self._gradients.values()
        return first.detach().new_zeros(()).expand(nodes.shape_of(*place))

    def product(self, mats: Mapping[NodeOutput, Tensor]) -> dict[NodeOutput, Tensor]:
        """``R v``.

        Args:
            mats: ``v`` at some operands, ``[V, *shape]``; zero at the others.

        Returns:
            Shape ``[V, *shape]`` at each operand; an operand whose value is zero may be missing.

        Raises:
            UnsupportedError: The formula has no derivative.
        """
        (first, *_) = mats.values()
        with explained():
            return beside_pass(partial(self._push, mats), self._order, first.device)

    def _push(self, mats: Mapping[NodeOutput, Tensor]) -> dict[NodeOutput, Tensor]:
        """Send the columns through the nodes of the formula."""
        starts: dict[NodeOutput, Tensor] = {}
        for position, gradient in self._gradients.items():
            mat, origin = mats.get(_place(self.node, position)), _origin(gradient)
            if mat is not None:  # autograd sums to the shape of the operand behind the formula
                lead = [1] * (gradient.dim() - mat.dim() + 1)
                mat = mat.reshape(len(mat), *lead, *mat.shape[1:])
                mat = mat.expand(len(mat), *gradient.shape)
                starts[origin] = starts[origin] + mat if origin in starts else mat
        found = bridge.push_through(self._order, starts, self._stops)
        return {place: mat for place, mat in found.items() if place in self._ends}

    def _consumers_first(self) -> list[Node]:
        """The nodes of the formula in topological order, consumers first."""
        origins = map(_origin, self._gradients.values())
        starts = [place[0] for place in origins if place not in self._stops]
        order = consumers_first(starts, self._behind)
        if any(map(is_leaf, order)):  # all ways that do not lead to operands end at a leaf
            raise refuse(self.node, "its second derivative is not only in its operands")
        return order

    def _behind(self, node: Node) -> list[Node]:
        return [c for c, nr in node.next_functions if c is not None and (c, nr) not in self._stops]


def _place(node: Node, position: int) -> NodeOutput:
    child, number = node.next_functions[position]
    assert child is not None
    return child, number


def _origin(tensor: Tensor) -> NodeOutput:
    assert tensor.grad_fn is not None
    return tensor.grad_fn, tensor.output_nr


def has_samples_in_front(place: NodeOutput, batch_size: int) -> bool:
    """Whether axis 0 is known to hold the samples in order, with the same number of rows each.

    This is known for outputs of calls, and for results of row-wise operations on them.
    """
    return any(is_output(p, batch_size) for p in reached([place], lambda p: _rows(p, batch_size)))


def is_output(place: NodeOutput, batch_size: int) -> bool:
    """Whether a call returned the tensor, with one entry of axis 0 for each sample."""
    site, shape = site_at(Edge(*place)), nodes.shape_of(*place)
    if site is None or shape[:1] != (batch_size,) or site.call.is_released:
        return False
    is_whole = site.call.stored.outputs[site.index].shape == shape
    return is_whole and not site.call.rule.batch_axis(View(site.call, site.index), site.index)


def _rows(place: NodeOutput, batch_size: int) -> Iterator[NodeOutput]:
    """The operands of a row-wise operation."""
    node, number = place
    shape = nodes.shape_of(node, number)
    if is_leaf(node) or not shape or shape[0] % batch_size or not shape[0]:
        return
    for position, (child, _) in enumerate(node.next_functions):
        if child is not None and nodes.keeps_rows(node, number, position):
            yield _place(node, position)
