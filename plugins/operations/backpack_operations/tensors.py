"""What is known of single tensors of a graph while it is walked through, and of ways between two.

A tensor is an output of a node. Everything that is asked of it for every way that leads there is
looked at once: a graph stays as it is meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph.nodes import is_leaf
from backpack_core.record.call import Edge
from backpack_core.record.owner import is_returned
from backpack_operations import nodes
from backpack_operations.alignment import Place
from backpack_operations.survey import GraphSurvey, edges_behind


class Known:
    """What is known of a tensor.

    Attributes:
        node: The node that made it.
        place: That node, and which of its outputs the tensor is.
        site: The call that is recorded there.
        is_call: Whether that is stepped over, and not gone through by nodes.
        is_loss: Whether it is that of a loss.
        is_returned: Whether it is what a model returned, with samples in front.
        axis: Where an output of a call has its samples: states have them elsewhere than on axis 0.
        operation: The operation; empty where a call is stepped over, or nothing is known.
        shape: The shape.
        length: The length of axis 0; ``None`` of a number.
        ways: What it was made of, leaves left out, each with its position in
            ``node.next_functions``, or among the inputs.
        positions: How many entries of axis 0 each sample has; zero where there are no samples.
        owned: Which they are, ``[N, R]``, where they are in no order.
        is_outer: Functions alone lead from it to what ``backward()`` is called on.
        is_before: Nobody has said yet where samples are: behind it, the loss becomes a number.
        is_picked: Entries of axis 0 are handed out further on, in any order.
        is_sorted: Samples are, by an index.
        is_dropped: It lost its samples' axis further on, whatever its length says.
        is_apart: What arrives is kept apart by sample.
    """

    __slots__ = (
        *("node", "place", "site", "is_call", "is_loss", "is_returned", "axis", "operation"),
        *("shape", "length", "ways", "positions", "owned", "is_outer", "is_before", "is_picked"),
        *("is_sorted", "is_dropped", "is_apart"),
    )

    def __init__(self, place: Place, survey: GraphSurvey) -> None:
        """Look at it; ``ways`` are for the walk to find."""
        node, number = self.place = place
        self.node = node
        self.site = site = survey.site_at(tuple.__new__(Edge, (node, number, 0)))  # the quick way
        self.is_call = site is not None and site.call not in survey.opened
        self.is_loss = site is not None and site.call.rule.is_loss
        self.axis = 0 if site is None else survey.axes.get((site.call, site.index), 0)
        self.is_returned = is_returned(node, number)
        self.operation = "" if self.is_call else nodes.operation_of(node)
        self.shape = shape = nodes.lengths_of(node, number)
        self.length = shape[0] if shape else None
        self.ways: list[tuple[Known, int]] = []
        found = survey.alignment  # of what was walked before, if any was
        self.positions, self.owned = found.positions.get(place, 0), found.owned.get(place)
        self.is_before, self.is_apart = place in found.before, place in found.apart
        self.is_outer = self.is_picked = self.is_sorted = self.is_dropped = False

    def is_settled(self) -> bool:
        """Whether it is known which entries of axis 0 each sample has."""
        return bool(self.positions) or self.owned is not None

    def is_turned(self) -> bool:
        """Whether it is a view with another axis in front."""
        return self.operation in nodes.TURNS and not nodes.keeps_rows(*self.place, 0)


class Way(NamedTuple):
    """From a tensor to one of those that it was made of.

    Attributes:
        above: What was made.
        below: What it was made of.
        position: Which operand, as a position in ``node.next_functions``; or which input.
    """

    above: Known
    below: Known
    position: int

    @property
    def keeps_rows(self) -> bool:
        """Whether the operation gives entry ``i`` of axis 0 from entry ``i`` of the operand."""
        above, below, position = self
        return nodes.keeps_rows_of(above.node, position, above.shape, below.shape)

    @property
    def keeps_length(self) -> bool:
        """Whether axis 0 is as long on both ends."""
        return self.above.length == self.below.length

    @property
    def is_broadcast(self) -> bool:
        """Whether what was made has more axes."""
        return len(self.below.shape) < len(self.above.shape)

    def is_beside(self) -> bool:
        """Whether the result may have its samples from another operand, as far as is known."""
        if self.above.operation == "Stack" or self.keeps_rows:
            return False
        # Of an unknown one (a view that is changed in place), the first is what it works on.
        is_several = bool(self.above.operation) and len(self.above.node.next_functions) > 1
        return self.is_broadcast or self.position > 0 or is_several

    def is_handed_out(self, samples: int) -> bool:
        """Whether entries of axis 0 are, as tokens to experts, however many they are.

        Or samples are sorted, as packed sequences are: there, rows of any number are in that order.
        """
        above, operation, is_sorted = self.above, self.above.operation, self.above.is_sorted
        if not above.is_picked or operation in nodes.GATHERS:
            is_sorted = operation == "IndexSelect" and nodes.selected(*above.place) == samples
            if is_sorted and above.positions:
                is_sorted = not self.keeps_rows
            is_picked = is_sorted or (operation in nodes.SCATTERS and self.position == 1)
        else:
            is_picked = is_sorted or self.keeps_length
        self.below.is_sorted |= is_sorted
        return is_picked

    def repeats(self) -> bool:
        """Whether no sample is made of it without repeating entries, if it is a table."""
        above, operation = self.above, self.above.operation
        is_turned = operation in nodes.TURNS and not self.keeps_rows
        is_moved = is_turned or operation in nodes.GATHERS or self.below.is_turned()
        if is_moved or not above.positions:
            return True
        return self.is_broadcast and not (operation and self.keeps_rows)

    def loses_samples(self, samples: int) -> bool:
        """Whether axis 0 is one that is gone, and samples, if any, are among those that are left.

        Is what is left of axis 0, or picked from it, of some samples, or with all of them?
        """
        above, operation = self.above, self.above.operation
        is_picked = operation in nodes.GATHERS and not above.positions
        is_reduced = len(self.below.shape) > len(above.shape)
        is_less = operation in nodes.REDUCTIONS and is_reduced
        if not (is_picked or operation in nodes.SELECTIONS or is_less):
            return False
        is_lost = any(length % samples == 0 for length in above.shape[is_picked:])
        self.below.is_dropped |= is_lost and not self.below.axis
        return is_lost

    def shows_none(self, samples: int) -> bool:
        """Whether the operand may have no samples in front, as what keeps its order has none."""
        if self.keeps_length:
            return True
        merged = list(self.below.shape[1:])  # or taken apart
        for length in reversed(self.above.shape):
            if merged[-1:] != [length]:
                break
            merged.pop()
        return any(length % samples == 0 for length in merged)


class Tensors(dict[Place, Known]):
    """The tensors of a graph, each looked at when it is first asked for.

    Attributes:
        targets: Parameters that no call reads off, by the node that sends something there, and the
            position of the edge.
    """

    def __init__(self, survey: GraphSurvey, targets: Mapping[Node, Mapping[int, Tensor]]) -> None:
        self._survey, self.targets = survey, targets

    def __missing__(self, place: Place) -> Known:
        """Look."""
        found = self[place] = Known(place, self._survey)
        return found

    def further(self, above: Known) -> list[Known]:
        """Find the ways on from a tensor; returns where they lead."""
        site, beside = above.site, self._survey.beside
        if site is not None and above.is_call:
            edges = [(i, edge) for i, edge in enumerate(site.call.edges) if edge is not None]
        else:
            known = self.targets.get(above.node, ())
            ways = [way for way in edges_behind(above.node) if way[0] not in known]
            edges = [(i, e) for i, e in ways if not (is_leaf(e.node) or e[:2] in beside)]
        above.ways += [(self[edge.node, edge.output_nr], i) for i, edge in edges]
        return [below for below, _ in above.ways]
