"""Where the samples lie at every tensor of a backward graph, and where there are none.

Most tensors have them on axis 0, one after the other. Where positions were merged into that axis,
each sample has several entries of it. What is computed from weights alone (a table of positions, a
tied weight) has no samples: a gradient there is a sum over them. From the last tensors that have
some, what is sent to such a tensor is therefore kept apart, sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.graph import faults, nodes
from backpack_core.graph.order import ranks
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.owner import owners_of
from backpack_core.record.view import View

Place = tuple[Node, int]  # an output of a node


class Crossing(NamedTuple):
    """What is known of the samples at a node.

    Attributes:
        batch_size: Number of samples.
        positions: How many entries of axis 0 each sample has, by output number; missing where the
            output has no samples.
        behind: The same by position in ``node.next_functions``.
        apart: The positions behind which what is sent is kept apart by sample.
        has_others: Whether there are other positions.
        is_readable: Whether the node may be asked for what autograd saved.
    """

    batch_size: int
    positions: dict[int, int]
    behind: dict[int, int]
    apart: frozenset[int] = frozenset()
    has_others: bool = True
    is_readable: bool = False


@dataclass
class Alignment:
    """Where samples lie; nothing is kept apart where every tensor has them on axis 0.

    Attributes:
        batch_size: Number of samples.
        faults: Why a call has no samples where others have them, for quantities that need them
            there.
        positions: How many entries of axis 0 each sample has, at outputs of nodes; zero where
            there are no samples.
        apart: Outputs of nodes at which what arrives is kept apart by sample.
        starts: Nodes with samples that send something to such an output.
        leaves: Parameters that no call reads off, or not all of them, by their node.
        beside: Parameters that the loss depends on without any sample, with a node on the way.
    """

    batch_size: int = 0
    faults: dict[tuple[Call, int], BackpackError] = field(default_factory=dict)
    positions: dict[Place, int] = field(default_factory=dict)
    apart: set[Place] = field(default_factory=set)
    starts: dict[Node, None] = field(default_factory=dict)
    leaves: dict[Node, Tensor] = field(default_factory=dict)
    beside: list[tuple[Tensor, Node]] = field(default_factory=list)
    _is_readable: bool = False

    def is_apart(self, edge: Edge) -> bool:
        """Whether what is sent to an edge is kept apart by sample."""
        return (edge.node, edge.output_nr) in self.apart

    def positions_at(self, edge: Edge) -> int:
        """How many entries of axis 0 each sample has; zero where there are none."""
        return self._known(edge.node, edge.output_nr)

    def positions_of(self, site: Site) -> int:
        """The same at an output of a call; of a loss, at what it receives."""
        call = site.call
        if call.rule.is_loss:
            fault = (call, site.index) in self.faults
            received = call.stored.inputs[0].shape[:1].numel() if fault else self.batch_size
            return received // self.batch_size if fault and not received % self.batch_size else 1
        return self.positions.get((site.edge.node, site.edge.output_nr), 1)

    def crossing(self, node: Node) -> Crossing:
        """What is known of the samples at a node."""
        outputs = {nr: self._known(node, nr) for nr in range(len(node._input_metadata))}
        behind: dict[int, int] = {}
        apart = []
        for position, (child, number) in enumerate(node.next_functions):
            if child is None:
                continue
            behind[position] = self._known(child, number)
            if (child, number) in self.apart:
                apart.append(position)
        return Crossing(
            self.batch_size,
            {nr: k for nr, k in outputs.items() if k},
            {position: k for position, k in behind.items() if k},
            frozenset(apart),
            len(behind) > len(apart),
            self._is_readable,
        )

    def _known(self, node: Node, number: int) -> int:
        size = nodes.shape_of(node, number)[:1]
        found = self.positions.get((node, number), 1)
        return found if size == (found * self.batch_size,) else 0  # else on another axis

    def update(self, survey: Survey, roots: Iterable[Edge], can_keep_apart: bool) -> None:
        """Find out where samples lie.

        Args:
            survey: What is known about the graph.
            roots: What ``backward()`` is called on, or more of it than before.
            can_keep_apart: Whether samples can be kept apart where a tensor has none.
        """
        self.batch_size, self._is_readable = survey.batch_size, survey.is_readable
        for call, index in survey.sites:
            fault = None if call.is_released else _fault(survey, call, index)
            if fault is not None:
                self.faults[call, index] = fault
        if can_keep_apart:
            _hand_to_nodes(survey)
        tables: set[Call] = set()
        if can_keep_apart and survey.batch_size > 1:
            tables = {site.call for site in survey.sites.values() if _is_table(survey, site)}
        if self.faults or survey.bare or tables:
            _Walk(survey, self, tables).run([*roots])


def _fault(survey: Survey, call: Call, index: int) -> BackpackError | None:
    """Why a call does not have the batch where others have it; ``None`` if it does."""
    stored, size = call.stored, survey.batch_size
    output, inputs = stored.outputs[index], stored.inputs
    if not inputs:
        return faults.without_inputs(call) if survey.trained[call] else None
    axis = survey.axes[call, index]
    received = inputs[0].shape[0] if inputs[0].dim() else 0
    if received != size:
        return faults.other_batch(call, received, size)
    is_loss = call.rule.is_loss or output.dim() == 0
    if not is_loss and (axis >= output.dim() or output.shape[axis] != size):
        return faults.moved_batch(call, size, output)
    return None


class _Walk:
    """Goes through a graph twice: consumers first, and back."""

    def __init__(self, survey: Survey, found: Alignment, tables: set[Call]) -> None:
        self._survey = survey
        self._found = found
        self._tables = tables
        self._size = max(1, survey.batch_size)
        # Before any samples: what a loss becomes on its way to being a single number.
        self._before: set[Place] = set()
        self._order: list[Place] = []
        self._of_weights: dict[Node, bool] = {}
        self._targets: dict[tuple[Node, int], Parameter] = {}  # by the edge that leads to them

    def run(self, roots: list[Edge]) -> None:
        """Fill in what is found."""
        self._find_targets()
        start: list[Place] = [(edge.node, edge.output_nr) for edge in roots]
        for place in start:
            size = nodes.shape_of(*place)[:1]
            self._found.positions[place] = int(size == (self._size,))
            if not self._found.positions[place]:
                self._before.add(place)
        rank = ranks(*(node for node, _ in start))
        reached = dict.fromkeys(start)
        by_node: dict[Node, list[int]] = {}
        for node, nr in start:
            by_node.setdefault(node, []).append(nr)
        for node in rank:
            for nr in by_node.get(node, ()):
                place = (node, nr)
                self._order.append(place)
                for child, position in self._behind(place):
                    self._derive(place, child, position)
                    if child not in reached:
                        reached[child] = None
                        by_node.setdefault(child[0], []).append(child[1])
        for place in reversed(self._order):
            self._keep_apart(place)

    def _find_targets(self) -> None:
        """Where parameters are used outside of calls which read them off."""
        survey = self._survey
        for call, index in {**self._found.faults, **dict.fromkeys((c, 0) for c in self._tables)}:
            if call.rule.is_loss or not survey.trained[call]:
                continue
            if call.goes_inside:  # nothing to replay sample by sample
                survey.disown(call)
            elif not _is_willing(call, index):
                survey.open(survey.sites[call, index])
        if not survey.bare_edges:
            return
        models = owners_of(call.module for call in survey.trained)
        own = {id(parameter) for model in models for parameter in model.parameters()}
        self._targets = {e: p for e, p in survey.bare_edges.items() if id(p) in own}

    def _behind(self, place: Place) -> Iterator[tuple[Place, int]]:
        """Where what arrives goes on to, and by which way out of the node."""
        node, nr = place
        site = self._survey.site_at(Edge(node, nr))
        if site is not None and not self._survey.goes_inside(site.call):
            edges = site.call.edges
            yield from (((e.node, e.output_nr), i) for i, e in enumerate(edges) if e is not None)
            return
        for position, edge in edges_behind(node):
            place = (edge.node, edge.output_nr)
            if place not in self._survey.beside and not nodes.is_leaf(edge.node):
                yield place, position

    # Downwards -----------------------------------------------------------------------------------

    def _derive(self, place: Place, child: Place, position: int) -> None:
        """How many entries of axis 0 each sample has at a child, as this way tells."""
        found = self._found.positions
        if found.get(child):
            return
        shape = nodes.shape_of(*child)
        is_before = place in self._before
        site = self._survey.site_at(Edge(*child))
        if self._is_of_weights(child[0]) or (site is not None and site.call in self._tables):
            found[child] = 0
        elif shape[:1] == (self._size,) and not self._is_broadcast(place, child):
            found[child] = 1
        elif shape and not shape[0] % self._size and self._keeps_rows(place, child, position):
            found[child] = shape[0] // self._size
        else:
            found[child] = 0
            if is_before:
                self._before.add(child)
        if found[child]:
            self._before.discard(child)

    def _is_broadcast(self, place: Place, child: Place) -> bool:
        """Whether an operand has too few axes to have one where the samples are."""
        is_node = self._survey.site_at(Edge(*place)) is None
        is_known = is_node and nodes.operation_of(place[0]) in nodes.ELEMENTWISE
        return is_known and len(nodes.shape_of(*child)) < len(nodes.shape_of(*place))

    def _keeps_rows(self, place: Place, child: Place, position: int) -> bool:
        """Whether axis 0 of a child is known to hold the samples one after the other."""
        if place in self._before:  # nobody has said yet where they are: the dye will tell
            return True
        if not self._found.positions.get(place):
            return False
        site = self._survey.site_at(Edge(*place))
        if site is not None and not self._survey.goes_inside(site.call):
            return nodes.shape_of(*place)[:1] == nodes.shape_of(*child)[:1]
        return nodes.keeps_rows(*place, position)

    def _is_of_weights(self, node: Node) -> bool:
        """Whether a tensor is known to be a function of parameters alone."""
        todo = [node]
        while todo:
            this = todo[-1]
            if this in self._of_weights:
                todo.pop()
                continue
            children = [child for child, _ in this.next_functions if child is not None]
            inner = [child for child in children if not nodes.is_leaf(child)]
            calls = self._calls_at(this)
            if calls:
                inner = [e.node for call in calls for e in call.edges if e is not None]
                children = [*inner, *[n for call in calls for n in _leaves_given_to(call)]]
            is_known = nodes.is_of_its_operands(this) if not calls else True
            is_known &= all(map(_knows_its_inputs, calls))
            is_known &= all(map(_is_weight, {*children} - {*inner}))
            if not is_known or any(self._of_weights.get(child) is False for child in inner):
                self._of_weights[this] = False
            elif all(child in self._of_weights for child in inner):
                self._of_weights[this] = bool(children)
            else:
                todo += [child for child in inner if child not in self._of_weights]
        return self._of_weights[node]

    def _calls_at(self, node: Node) -> set[Call]:
        """Calls that are stepped over at a node."""
        sites = (self._survey.site_at(Edge(node, nr)) for nr in range(len(node._input_metadata)))
        calls = {site.call for site in sites if site is not None}
        return {call for call in calls if not self._survey.goes_inside(call)}

    # Upwards -------------------------------------------------------------------------------------

    def _keep_apart(self, place: Place) -> None:
        """Whether samples have to be told apart at a place that has none, for what is behind."""
        found, survey = self._found, self._survey
        node, nr = place
        site = survey.site_at(Edge(node, nr))
        needs = any(child in found.apart for child, _ in self._behind(place))
        if site is None or survey.goes_inside(site.call):
            for position, edge in edges_behind(node):
                parameter = self._targets.get((node, position))
                if parameter is not None:
                    needs = True
                    found.leaves[edge.node] = parameter
                    found.apart.add((edge.node, 0))
                    found.positions[edge.node, 0] = 0
                    if place in self._before:
                        found.beside.append((parameter, node))
        if site is not None and not found.positions[place] and not site.call.rule.is_loss:
            needs |= bool(survey.trained[site.call])
        if not needs:
            return
        if found.positions[place]:
            if site is None or survey.goes_inside(site.call):  # else the call sees to it
                found.starts[node] = None
        elif place not in self._before:
            found.apart.add(place)
        elif site is None or not site.call.rule.is_loss:
            self._note_beside(place)

    def _note_beside(self, place: Place) -> None:
        """What is kept apart behind a number that has no samples is no function of any."""
        todo, seen = [place], {place}
        while todo:
            this = todo.pop()
            for position, edge in edges_behind(this[0]):
                child = (edge.node, edge.output_nr)
                parameter = self._targets.get((this[0], position))
                if parameter is not None:
                    self._found.beside.append((parameter, this[0]))
                elif child in self._found.apart and child not in seen:
                    seen.add(child)
                    todo.append(child)


def _hand_to_nodes(survey: Survey) -> None:
    """Look at parameters where operations use them, not at calls that know no more of them.

    A container with parameters of its own would have to run once more as a whole; and a call that
    was given a parameter as an argument does not own it.
    """
    for site in [*survey.sites.values()]:
        call = site.call
        if call.rule.is_loss or call.is_released or not call.stored.outputs:
            continue
        if not survey.goes_inside(call):
            if call.edges.count(None) and _leaves_given_to(call):
                survey.open(site)
        elif _has_children(call) and not any(own.is_covered for own in survey.trained[call]):
            survey.disown(call)
    users: dict[int, set[Node]] = {}
    for (node, _), parameter in survey.bare_edges.items():
        users.setdefault(id(parameter), set()).add(node)
    for site in [*survey.sites.values()]:
        # What is computed inside of a call may be used outside, too, past the output.
        own = survey.trained[site.call]
        used = set().union(*(users.get(id(trained.parameter), ()) for trained in own))
        if used and not used.isdisjoint(survey.inside(site)):
            if survey.goes_inside(site.call):
                survey.disown(site.call)
            else:
                survey.open(site)


def _has_children(call: Call) -> bool:
    return bool(call.module._modules.keys() - {"parametrizations"})


def _is_table(survey: Survey, site: Site) -> bool:
    """Whether axis 0 of an output may be as long as the batch by chance, as of ``arange(T)``.

    The call received nothing that the model did, and its output is small enough to be one for all
    samples: then it is taken for one, which is exact in any case.
    """
    call = site.call
    if call.rule.is_loss or not call.sizes or call.receives_input or not survey.trained[call]:
        return False
    if call.is_released or any(edge is not None for edge in call.edges):
        return False
    return call.stored.outputs[site.index].nbytes * survey.batch_size <= survey.widest


def _is_willing(call: Call, index: int) -> bool:
    """Whether the rule takes what the call received, which may have no batch at all."""
    try:
        call.rule.check(View(call, index))
    except BackpackError:
        return False
    return True


def _knows_its_inputs(call: Call) -> bool:
    """Whether all that a call received has an edge, or is a parameter."""
    given = zip(call.stored.inputs, call.edges, strict=True)
    return all(edge is not None or isinstance(tensor, Parameter) for tensor, edge in given)


def _leaves_given_to(call: Call) -> list[Node]:
    given = zip(call.stored.inputs, call.edges, strict=True)
    leaves = [
        t for t, edge in given if edge is None and isinstance(t, Parameter) and t.requires_grad
    ]
    return [get_gradient_edge(t).node for t in leaves]


def _is_weight(leaf: Node) -> bool:
    return isinstance(leaf.variable, Parameter)  # type: ignore[attr-defined]
