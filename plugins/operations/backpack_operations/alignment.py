"""Where the samples lie at every tensor of a backward graph.

Most tensors have them on axis 0, in order. Where a view merged positions into that axis, each
sample has several entries. A tensor computed from weights alone (a table of positions, a tied
weight) has no samples, and its gradient is a sum over them. There, columns are kept apart by
sample, from the last tensors that have samples on. See ``docs/design/operations.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.graph import is_leaf
from backpack_core.record.call import Call, Edge, Site
from backpack_operations import faults, nodes
from backpack_operations.apart import cross_apart, cross_columns
from backpack_operations.nodes import NodeOutput
from backpack_operations.viewed import Layout, rows_seen
from backpack_products.columns import ApartColumns, Columns, InRuns


class Crossing(NamedTuple):
    """Where the samples lie at the outputs and operands of one node that a quantity crosses.

    Attributes:
        batch_size: Number of samples.
        positions: How many entries of axis 0 each sample has, by output number; outputs without
            samples are missing.
        owned: Which entries of axis 0 each sample has, a mask ``[N, R]``, by output number; only
            where entries are in no order.
        behind: How many entries, or which (a mask ``[N, R]``), each sample has at the operands; by
            position in ``node.next_functions``.
        apart: The positions of operands at which columns are kept apart by sample.
        apart_outputs: The outputs at which columns are kept apart.
        others: The outputs that neither have samples on axis 0 nor are kept apart.
        has_others: Whether there are operands at which columns are not kept apart.
        runs: The length of runs of entries of one sample, at outputs where autograd's gradient
            consists of such runs (see ``runs.py``).
        in_runs: The positions of such operands.
        is_table: Whether the outputs are computed from parameters alone.
        grads: The gradients at the outputs, if autograd has reached the node.
        size: Returns how many columns may travel at once; ``None`` for all.
        carry: Sends a chunk, given by position, through the rest of the net at once.
    """

    batch_size: int
    positions: dict[int, int]
    behind: Mapping[int, int | Tensor]
    owned: dict[int, Tensor] = {}  # noqa: RUF012 - never written to
    apart: frozenset[int] = frozenset()
    apart_outputs: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    has_others: bool = True
    runs: Mapping[int, int] = {}
    in_runs: frozenset[int] = frozenset()
    is_table: bool = False
    grads: Sequence[Tensor | None] = ()
    size: Callable[[], int | None] = lambda: None
    carry: Callable[[list[tuple[int, Any]]], None] = lambda part: None

    def push(
        self, node: Node, quantities: Mapping[int, Columns], keeps_all: bool = True
    ) -> list[tuple[int, Columns]]:
        """Push columns through the node, apart by sample where they must be.

        Args:
            node: An autograd node that autograd has not executed yet.
            quantities: Columns at the node's outputs, by output number.
            keeps_all: Whether to return also columns that are not kept apart behind the node.

        Returns:
            Pairs (position in ``node.next_functions``, columns there).

        Raises:
            BridgeError: The node cannot be called for columns.
        """
        if not keeps_all and (self.runs or self.in_runs):
            return self._push_gradients(node, quantities)
        are_apart = any(isinstance(columns, ApartColumns) for columns in quantities.values())
        if keeps_all and not self.apart and not are_apart:
            return cross_columns(node, quantities)
        return cross_apart(node, quantities, self, keeps_all)

    def _push_gradients(
        self, node: Node, quantities: Mapping[int, Columns]
    ) -> list[tuple[int, Columns]]:
        """Push gradients as columns, but not to where autograd's own gradient is in runs."""
        there = self._replace(apart=self.apart - self.in_runs, runs={}, in_runs=frozenset())
        if not there.apart and self.in_runs:
            return []
        given = {
            nr: InRuns(columns, self.batch_size, self.runs[nr]) if nr in self.runs else columns
            for nr, columns in quantities.items()
        }
        return cross_apart(node, given, there, keeps_all=False)


@dataclass
class Alignment:
    """Where the samples lie in a graph; empty if every tensor has them on axis 0.

    Attributes:
        batch_size: Number of samples.
        faults: The error to raise for a call without one row per sample on axis 0, if a quantity
            needs these rows.
        positions: How many entries of axis 0 each sample has, at outputs of nodes; zero where
            there are no samples.
        owned: Which entries of axis 0 each sample has, a mask ``[N, R]``, at outputs of nodes that
            have them in no order: between a loss and the operation that moved them.
        before: Outputs of nodes between the samples and ``backward()``: the steps by which a loss
            becomes a single number.
        apart: Outputs of nodes at which columns are kept apart by sample.
        starts: Nodes with samples that send columns to such an output.
        runs: The length of runs of entries of one sample (see ``runs.py``), at those outputs
            ``apart`` that receive nothing else. Autograd's gradient there tells samples apart.
        later: Nodes with such an output that send columns on to others: there, gradients begin
            to be kept apart.
        leaves: Parameters that are read where operations use them, by the output of a node.
        beside: Parameters that the loss depends on without any sample, with an operation that uses
            them.
    """

    batch_size: int = 0
    faults: dict[tuple[Call, int], BackpackError] = field(default_factory=dict)
    positions: dict[NodeOutput, int] = field(default_factory=dict)
    owned: dict[NodeOutput, Tensor] = field(default_factory=dict)
    before: set[NodeOutput] = field(default_factory=set)
    apart: set[NodeOutput] = field(default_factory=set)
    starts: dict[Node, None] = field(default_factory=dict)
    runs: dict[NodeOutput, int] = field(default_factory=dict)
    later: dict[Node, None] = field(default_factory=dict)
    leaves: dict[NodeOutput, Tensor] = field(default_factory=dict)
    beside: list[tuple[Tensor, Node]] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether every tensor has samples on axis 0."""
        return not any(getattr(self, name) for name in vars(self) if name != "batch_size")

    def is_apart(self, edge: Edge) -> bool:
        """Whether columns at an edge are kept apart by sample."""
        return (edge.node, edge.output_nr) in self.apart

    def entries_at(self, edge: Edge) -> int | Tensor:
        """How many entries of axis 0 each sample has at an edge, or a mask; zero for no samples."""
        owned = self.owned_at(edge)
        return self._count(edge.node, edge.output_nr) if owned is None else owned

    def owned_at(self, edge: Edge) -> Tensor | None:
        """The mask ``[N, R]`` of entries of axis 0 by sample; ``None`` if they are in order."""
        return self.owned.get((edge.node, edge.output_nr))

    def owned_of(self, site: Site) -> Tensor | None:
        """The mask ``[N, R]`` of entries of axis 0 by sample, at an output of a call.

        If the output is a view that was overwritten in output, the alignment knows the base's mask.
        """
        owned, layout = self.owned_at(site.edge), site.layout
        if owned is None or layout is None:
            return owned
        if owned.shape[1] != layout.base_size[0]:  # the base has samples on another axis
            raise faults.turned_batch(site.call, 0, self.batch_size)
        seen = rows_seen(layout, owned.long().argmax(0))
        if seen is None:
            raise faults.turned_batch(site.call, 0, self.batch_size)
        return seen == torch.arange(len(owned), device=owned.device).unsqueeze(1)

    def positions_of(self, site: Site, axis: int = 0) -> int:
        """How many entries of an axis each sample has at a call's output, or at a loss's input."""
        call = site.call
        if call.rule.is_loss:
            fault = (call, site.index) in self.faults
            if not fault:
                return 1
            received = call.stored.inputs[0].shape[:1].numel()
            count, rest = divmod(received, self.batch_size)
            edge = call.edges[0]
            is_picked = count == 1 and edge is not None and self.owned_at(edge) is not None
            return max(2, received) if rest or is_picked else count  # all may belong to one sample
        output = (site.edge.node, site.edge.output_nr)
        positions: int = self.positions.get(output, 1)
        layout: Layout | None = site.layout
        if layout is not None and output not in self.apart:
            # The alignment knows the base, which may be [1, N · C, L].
            if positions:
                return max(1, layout.size[axis] // max(1, self.batch_size))
            if (call, site.index) not in self.faults:
                return 1
        return 1 if output in self.before else positions

    def crossing(self, node: Node) -> Crossing:
        """Where the samples lie at the outputs and operands of a node."""
        if not self.positions:  # everywhere on axis 0
            return Crossing(self.batch_size, {}, {})
        operands = [(i, (child, nr)) for i, (child, nr) in enumerate(node.next_functions) if child]
        own = [(nr, (node, nr)) for nr in range(len(node._input_metadata))]
        (behind, apart), (outputs, apart_outputs) = self._at(operands), self._at(own)
        others = frozenset([nr for nr, _ in own if nr not in outputs and nr not in apart_outputs])
        owned = {nr: self.owned[output] for nr, output in own if output in self.owned}
        masks = {i: self.owned[operand] for i, operand in operands if operand in self.owned}
        entries: dict[int, int | Tensor] = {**behind, **masks}
        sides = owned, apart, apart_outputs, others, len(operands) > len(apart)
        there = Crossing(self.batch_size, outputs, entries, *sides)
        if not self.runs:
            return there
        runs = {nr: self.runs[output] for nr, output in own if output in self.runs}
        in_runs = frozenset([i for i, operand in operands if operand in self.runs])
        return there._replace(runs=runs, in_runs=in_runs)

    def note_later(self, is_announced: bool) -> None:
        """Note where gradients begin to be kept apart after runs; nowhere if more may be found."""
        if not is_announced:
            self.runs.clear()
        self.later = {node: None for node, _ in self.runs if self._sends_on(node)}

    def _sends_on(self, node: Node) -> bool:
        operands = [(child, nr) for child, nr in node.next_functions if child is not None]
        others = [operand for operand in operands if operand not in self.runs]
        return any(operand in self.apart or not is_leaf(operand[0]) for operand in others)

    def _at(self, tensors: list[tuple[int, NodeOutput]]) -> tuple[dict[int, int], frozenset[int]]:
        """Entries of axis 0 per sample, by number; and the numbers where columns are apart."""
        counts = {number: self._count(*tensor) for number, tensor in tensors}
        apart = frozenset([number for number, tensor in tensors if tensor in self.apart])
        return {number: count for number, count in counts.items() if count}, apart

    def _count(self, node: Node, output_nr: int) -> int:
        """Entries of axis 0 per sample; zero without samples, or with samples on another axis."""
        shape = nodes.lengths_of(node, output_nr)
        count = self.positions.get((node, output_nr), 1)
        return count if shape and shape[0] == count * self.batch_size else 0
