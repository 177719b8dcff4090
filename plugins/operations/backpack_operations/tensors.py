"""The facts about single tensors that the walks for sample axes collect, and links between two.

A tensor is an output of a node. A link leads from a tensor to one of the operands that it was
computed from, and says what that one operation tells of the operand's samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import is_leaf
from backpack_core.record.call import Edge
from backpack_core.record.view import View
from backpack_operations import nodes
from backpack_operations.nodes import NodeOutput
from backpack_operations.received import is_returned
from backpack_operations.survey import GraphSurvey, edges_behind


class TensorFacts:
    """The facts about a tensor, looked up once for all links that lead to it.

    Attributes:
        node: The node that made it.
        output: The node and the number of its output.
        site: The call that returned the tensor, if any did.
        is_call: Whether that call is stepped over, and not crossed node by node.
        is_loss: Whether that call is a loss.
        is_returned: Whether a model returned the tensor, so that samples are in front.
        axis: The axis of a call's output that holds the samples; recurrent states have another.
        operation: The name of the operation; empty if a call is stepped over, or if unknown.
        shape: The shape.
        length: The length of axis 0; ``None`` of a number.
        operands: What it was computed from, without leaves, each with its position in
            ``node.next_functions`` or among the call's inputs.
        positions: How many entries of axis 0 each sample has; zero where there are no samples.
        owned: Which entries each sample has, ``[N, R]``, where they are in no order.
        is_outer: Only functions, no modules, lead from it to what ``backward()`` is called on.
        is_before: No tensor with samples has been met yet on the way from the loss to here.
        is_picked: Consumers scatter or gather its entries of axis 0, in any order.
        is_sorted: Consumers sort its entries of axis 0 by an index, all samples at once.
        is_dropped: A consumer removed its axis 0, and still has samples: it had none in front.
        is_refuted: Only its length said whose its rows are, and its consumers say otherwise.
        is_apart: Columns that arrive are kept apart by sample.
    """

    __slots__ = (
        *("node", "output", "site", "is_call", "is_loss", "is_returned", "axis", "operation"),
        *(
            "shape",
            "length",
            "operands",
            "positions",
            "owned",
            "is_outer",
            "is_before",
            "is_picked",
        ),
        *("is_sorted", "is_dropped", "is_refuted", "is_apart"),
    )

    def __init__(self, output: NodeOutput, survey: GraphSurvey) -> None:
        """Look up what the survey and the node tell; the walk adds ``operands``."""
        node, number = self.output = output
        self.node = node
        self.site = site = survey.site_at(tuple.__new__(Edge, (node, number, 0)))  # the quick link
        self.is_call = site is not None and site.call not in survey.opened
        self.is_loss = site is not None and site.call.rule.is_loss
        self.axis = 0 if site is None else survey.axes.get((site.call, site.index), 0)
        self.is_returned = is_returned(node, number)
        self.operation = "" if self.is_call else nodes.operation_of(node)
        self.shape = shape = nodes.lengths_of(node, number)
        self.length = shape[0] if shape else None
        self.operands: list[tuple[TensorFacts, int]] = []
        earlier = survey.alignment  # of an earlier walk in this pass, if there was one
        self.positions, self.owned = earlier.positions.get(output, 0), earlier.owned.get(output)
        self.is_before, self.is_apart = output in earlier.before, output in earlier.apart
        self.is_outer = self.is_picked = self.is_sorted = self.is_dropped = False
        self.is_refuted = False

    def is_settled(self) -> bool:
        """Whether it is known which entries of axis 0 each sample has."""
        return bool(self.positions) or self.owned is not None

    def is_turned(self) -> bool:
        """Whether it is a permuted view with another axis in front."""
        return self.operation in nodes.TURNS and not nodes.keeps_rows(*self.output, 0)

    def is_uneven(self) -> bool:
        """Whether it is one of several parts of different lengths: as long as the batch by chance.

        Rows that belong to one sample are split off so, before they are added up.
        """
        if not self.operation.startswith("Split"):
            return False
        parts = range(len(self.node._input_metadata))
        return len({nodes.lengths_of(self.node, number)[:1] for number in parts}) > 1


class Link(NamedTuple):
    """A link from a tensor to one of those that it was computed from.

    Attributes:
        result: What was computed: an operation's result, or a call's output.
        operand: What it was computed from.
        position: Its position in ``node.next_functions``, or among the call's inputs.
    """

    result: TensorFacts
    operand: TensorFacts
    position: int

    @property
    def keeps_rows(self) -> bool:
        """Whether entry ``i`` of the result's axis 0 depends on entry ``i`` of the operand only."""
        result, operand, position = self
        return nodes.keeps_rows_of(result.node, position, result.shape, operand.shape)

    @property
    def keeps_length(self) -> bool:
        """Whether axis 0 of the result is as long as that of the operand."""
        return self.result.length == self.operand.length

    @property
    def is_broadcast(self) -> bool:
        """Whether the result has more axes than the operand."""
        return len(self.operand.shape) < len(self.result.shape)

    def is_taken_elsewhere(self) -> bool:
        """Whether a call takes the samples of the operand on another axis, as an initial state."""
        site = self.result.site
        if site is None or not (self.position and self.result.is_call):
            return False
        return bool(site.call.rule.batch_axis(View(site.call, site.index), self.position))

    def is_beside(self) -> bool:
        """Whether the samples of the result may come from another operand."""
        if self.result.operation == "Stack" or self.keeps_rows:
            return False
        # Of an unknown operation (a view that is changed in place), the first is the main operand.
        is_several = bool(self.result.operation) and len(self.result.node.next_functions) > 1
        return self.is_broadcast or self.position > 0 or is_several

    def is_handed_out(self, samples: int) -> bool:
        """Whether entries of the operand's axis 0 are picked in any order, however many there are.

        Tokens are handed out to experts in this way. Packed sequences sort samples by length: from
        there on, rows of any number stand in that order.
        """
        result, operation, is_sorted = self.result, self.result.operation, self.result.is_sorted
        if not result.is_picked or operation in nodes.GATHERS:
            is_sorted = operation == "IndexSelect" and nodes.selected(*result.output) == samples
            if is_sorted and result.positions:
                is_sorted = not self.keeps_rows
            is_picked = is_sorted or (operation in nodes.SCATTERS and self.position == 1)
        else:
            is_picked = is_sorted or self.keeps_length
        self.operand.is_sorted |= is_sorted
        return is_picked

    def repeats(self) -> bool:
        """Whether a table as operand can only serve samples by being repeated or picked from."""
        result, operation = self.result, self.result.operation
        is_turned = operation in nodes.TURNS and not self.keeps_rows
        is_moved = is_turned or operation in nodes.GATHERS or self.operand.is_turned()
        if is_moved or not result.positions:
            return True
        return self.is_broadcast and not (operation and self.keeps_rows)

    def loses_samples(self, samples: int) -> bool:
        """Whether the operand's axis 0 was removed, although the result may still have all samples.

        So it is if an axis of what is left, after a selection or a sum, fits the batch: then axis 0
        was another one than that of the samples.
        """
        result, operation = self.result, self.result.operation
        is_picked = operation in nodes.GATHERS and not result.positions
        is_reduced = len(self.operand.shape) > len(result.shape)
        is_less = operation in nodes.REDUCTIONS and is_reduced
        if not (is_picked or operation in nodes.SELECTIONS or is_less):
            return False
        is_lost = any(length % samples == 0 for length in result.shape[is_picked:])
        self.operand.is_dropped |= is_lost and not self.operand.axis
        return is_lost

    def shows_none(self, samples: int) -> bool:
        """Whether the operand may have no samples in front, as the result has none."""
        if self.keeps_length:
            return True
        merged = list(self.operand.shape[1:])  # the axes that a view merged or split
        for length in reversed(self.result.shape):
            if merged[-1:] != [length]:
                break
            merged.pop()
        return any(length % samples == 0 for length in merged)


class Tensors(dict[NodeOutput, TensorFacts]):
    """The facts about the tensors of a graph, each looked up when it is first asked for.

    Attributes:
        targets: The parameters that are read where operations use them: by the operation's node,
            and the position of the edge.
    """

    def __init__(self, survey: GraphSurvey, targets: Mapping[Node, Mapping[int, Tensor]]) -> None:
        self._survey, self.targets = survey, targets

    def __missing__(self, output: NodeOutput) -> TensorFacts:
        """Look up the facts about an output of a node."""
        facts = self[output] = TensorFacts(output, self._survey)
        return facts

    def further(self, result: TensorFacts) -> list[TensorFacts]:
        """Find the operands of a tensor; returns them."""
        site, beside = result.site, self._survey.beside
        if site is not None and result.is_call:
            edges = [(i, edge) for i, edge in enumerate(site.call.edges) if edge is not None]
        else:
            targets = self.targets.get(result.node, ())
            edges = [(i, e) for i, e in edges_behind(result.node) if i not in targets]
            edges = [(i, e) for i, e in edges if not (is_leaf(e.node) or e[:2] in beside)]
        result.operands += [(self[edge.node, edge.output_nr], i) for i, edge in edges]
        return [operand for operand, _ in result.operands]
