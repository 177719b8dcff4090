"""What is known of where the samples lie at every tensor of a backward graph.

Most tensors have them on axis 0, in order. Where a view merged positions into that axis, each
sample has several entries. A tensor made of weights alone (a table of positions, a tied weight) has
no samples, and its gradient is a sum over them. Quantities are kept apart there, sample by sample,
beginning at the last tensors that have samples. See ``docs/design/operations.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.record.call import Call, Edge, Site
from backpack_operations import faults, nodes
from backpack_operations.apart import cross_apart, cross_columns
from backpack_operations.viewed import look_through
from backpack_products.columns import ApartColumns, Columns

Place = tuple[Node, int]  # an output of a node


class Crossing(NamedTuple):
    """What is known of the samples around one node that a quantity crosses.

    Attributes:
        batch_size: Number of samples.
        positions: How many entries of axis 0 each sample has, by output number; outputs without
            samples are missing.
        owned: Which entries of axis 0 each sample has, ``[N, R]``, by output number, where picked
            entries are in no order.
        behind: How many entries each sample has at the operands, or which; by position in
            ``node.next_functions``.
        apart: The positions of operands at which quantities are kept apart by sample.
        kept: The outputs at which they are.
        others: The outputs that neither have samples on axis 0 nor are kept apart.
        has_others: Whether there are operands at which quantities are not kept apart.
        grads: The gradients at the outputs, if autograd is at the node.
        size: Returns how many columns may go on at once; ``None`` for all.
        carry: Carries what it is given, by position, through the rest of the net at once.
    """

    batch_size: int
    positions: dict[int, int]
    behind: Mapping[int, int | Tensor]
    owned: dict[int, Tensor] = {}  # noqa: RUF012 - nobody writes into it
    apart: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    has_others: bool = True
    grads: Sequence[Tensor | None] = ()
    size: Callable[[], int | None] = lambda: None
    carry: Callable[[list[tuple[int, Any]]], None] = lambda part: None

    def push(
        self, node: Node, quantities: Mapping[int, Columns], keeps_all: bool = True
    ) -> list[tuple[int, Columns]]:
        """Push columns through the node, apart by sample where they are kept so.

        Args:
            node: An autograd node that autograd has not executed yet.
            quantities: Columns at the node's outputs, by output number.
            keeps_all: Whether to return columns as well that are not kept apart behind the node.

        Returns:
            Pairs (position in ``node.next_functions``, columns there).

        Raises:
            BridgeError: The node cannot be called for columns.
        """
        are_apart = any(isinstance(columns, ApartColumns) for columns in quantities.values())
        if keeps_all and not self.apart and not are_apart:
            return cross_columns(node, quantities)
        return cross_apart(node, quantities, self, keeps_all)


@dataclass
class Alignment:
    """Where the samples lie in a graph; empty if every tensor has them on axis 0.

    Attributes:
        batch_size: Number of samples.
        faults: Why a call has no samples where others have them, for quantities that need them
            there.
        positions: How many entries of axis 0 each sample has, at outputs of nodes; zero where
            there are no samples.
        owned: Which entries of axis 0 each sample has, ``[N, R]``, at outputs of nodes that have
            them in no order: between a loss and where they were picked.
        before: Outputs of nodes before any samples: what a loss becomes on its way to being a
            single number.
        apart: Outputs of nodes at which what arrives is kept apart by sample.
        starts: Nodes with samples that send something to such an output.
        leaves: Parameters that no call reads off, or not all of them, by the output of a node that
            they are.
        beside: Parameters that the loss depends on without any sample, with a node on the way.
    """

    batch_size: int = 0
    faults: dict[tuple[Call, int], BackpackError] = field(default_factory=dict)
    positions: dict[Place, int] = field(default_factory=dict)
    owned: dict[Place, Tensor] = field(default_factory=dict)
    before: set[Place] = field(default_factory=set)
    apart: set[Place] = field(default_factory=set)
    starts: dict[Node, None] = field(default_factory=dict)
    leaves: dict[Place, Tensor] = field(default_factory=dict)
    beside: list[tuple[Tensor, Node]] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether every tensor has samples on axis 0."""
        return not any(getattr(self, name) for name in vars(self) if name != "batch_size")

    def is_apart(self, edge: Edge) -> bool:
        """Whether quantities at an edge are kept apart by sample."""
        return (edge.node, edge.output_nr) in self.apart

    def entries_at(self, edge: Edge) -> int | Tensor:
        """How many entries of axis 0 each sample has at an edge, or which; zero for no samples."""
        owned = self.owned_at(edge)
        return self._known(edge.node, edge.output_nr) if owned is None else owned

    def owned_at(self, edge: Edge) -> Tensor | None:
        """Which entries of axis 0 each sample has at an edge, ``[N, R]``; ``None`` if in order."""
        return self.owned.get((edge.node, edge.output_nr))

    def owned_of(self, site: Site) -> Tensor | None:
        """Which entries of axis 0 each sample has at an output of a call, ``[N, R]``.

        What is known is of the tensor that the output is a view of, if it was overwritten since.
        """
        owned, layout = self.owned_at(site.edge), site.layout
        if owned is None or layout is None:
            return owned
        if (
            owned.shape[1] != layout.base_size[0]
        ):  # they are on another axis of what it is a view of
            raise faults.turned_batch(site.call, 0, self.batch_size)
        rows = owned.long().argmax(0).reshape(-1, *[1] * (len(layout.base_size) - 1))
        seen = look_through(layout, rows.expand(1, *layout.base_size)).squeeze(0).flatten(1)
        if bool((seen != seen[:, :1]).any()):
            raise faults.turned_batch(site.call, 0, self.batch_size)
        return seen[:, 0] == torch.arange(len(owned), device=owned.device).unsqueeze(1)

    def positions_of(self, site: Site, axis: int = 0) -> int:
        """How many entries of an axis each sample has at an output of a call.

        Of a loss, at its input.
        """
        call = site.call
        if call.rule.is_loss:
            fault = (call, site.index) in self.faults
            if not fault:
                return 1
            received = call.stored.inputs[0].shape[:1].numel()
            count, rest = divmod(received, self.batch_size)
            edge = call.edges[0]
            is_picked = count == 1 and edge is not None and self.owned_at(edge) is not None
            return max(2, received) if rest or is_picked else count  # all may be of one sample
        place = (site.edge.node, site.edge.output_nr)
        positions, layout = self.positions.get(place, 1), site.layout
        if layout is not None and place not in self.apart:
            # What is known is of the tensor that the output is a view of, as [1, N · C, L].
            if positions:
                return max(1, layout.size[axis] // max(1, self.batch_size))
            if (call, site.index) not in self.faults:
                return 1
        return 1 if place in self.before else positions

    def crossing(self, node: Node) -> Crossing:
        """What is known of the samples around a node."""
        if not self.positions:  # they are where they are everywhere else
            return Crossing(self.batch_size, {}, {})
        places = [(i, (child, nr)) for i, (child, nr) in enumerate(node.next_functions) if child]
        own = [(nr, (node, nr)) for nr in range(len(node._input_metadata))]
        (behind, apart), (outputs, kept) = self._at(places), self._at(own)
        others = frozenset([nr for nr, _ in own if nr not in outputs and nr not in kept])
        owned = {nr: self.owned[place] for nr, place in own if place in self.owned}
        has_others = len(places) > len(apart)
        picked = {i: self.owned[place] for i, place in places if place in self.owned}
        known: dict[int, int | Tensor] = {**behind, **picked}
        return Crossing(self.batch_size, outputs, known, owned, apart, kept, others, has_others)

    def _at(self, places: list[tuple[int, Place]]) -> tuple[dict[int, int], frozenset[int]]:
        """Entries of axis 0 for each sample, by number; and where samples are kept apart."""
        found = {number: self._known(*place) for number, place in places}
        apart = frozenset([number for number, place in places if place in self.apart])
        return {number: count for number, count in found.items() if count}, apart

    def _known(self, node: Node, number: int) -> int:
        shape = nodes.lengths_of(node, number)
        found = self.positions.get((node, number), 1)
        return found if shape and shape[0] == found * self.batch_size else 0  # on another axis
