"""The survey of any backward graph: core's :class:`Survey`, with operations and sample axes.

``surveying.py`` fills in calls, operations and faults; ``aligning.py`` fills in where the samples
lie. All others only ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.graph import Survey, Trained, complex_parameter
from backpack_core.record.call import Call, CallCaches, Edge, Site
from backpack_core.record.models import Run
from backpack_core.record.view import View
from backpack_operations._torch import CopyNode, is_saved_plainly
from backpack_operations.alignment import Alignment
from backpack_operations.data import Source
from backpack_operations.nodes import NodeOutput
from backpack_operations.order import reached
from backpack_operations.parameter_owners import owned_by_models
from backpack_operations.received import ModelRun, returned
from backpack_operations.told import Told
from backpack_operations.viewed import Layout, below, site_at, viewed_at
from backpack_products.substitutes import computed_substitutes

# The calls around a node that are crossed node by node, innermost first.
Region = tuple[Call, ...]


class Bare(NamedTuple):
    """A parameter that operations use outside of the module that owns it.

    Attributes:
        parameter: The parameter.
        node: The operation that the walk met last.
        edges: All operations that use it, each with a position in ``node.next_functions``.
    """

    parameter: Tensor
    node: Node
    edges: dict[tuple[Node, int], None]


@dataclass
class GraphSurvey(Survey):
    """Everything that is known about the graph of one backward pass.

    Outputs of calls are keys ``(call, index)``, outputs of nodes are keys ``(node, output_nr)``.

    Attributes:
        beside: The terms of ``backpack(beside=...)``, as outputs of nodes. The walk stops there.
        tells_samples: Whether an extension distinguishes samples, beyond a sum over them.
        shows_all: Whether only columns of all samples are sent.
        told: The sample of each input row, by ``backpack(samples=...)`` or by sums in the model.
        alignment: Where the samples lie.
        leaves: Parameters that are visited as if a call had returned them, by node and output.
        opened: Calls that are propagated node by node, because of their rule or in spite of it.
        tables: Nodes inside of calls that returned one tensor for all samples.
        widest: Bytes that one column takes at the widest call.
        outside: Parameters that are used outside of the calls of their own module, by ``id``.
        depth: The depth in the model's arguments at which each item is one sample; ``None`` if
            every argument has the samples on an axis.
        call_rows: The samples of calls that received only some of them, by the output's node.
        axes: The axis of each call's output that holds the samples.
        computed: For each call that is crossed node by node, the parameters that are
            results of a computation.
        handed: The parameters that ``functional_call`` handed to any model.
        received: The length of axis 0 of a call's first input; -1 if the output's length differs.
        unruled_losses: Calls without a rule that compute a loss from outputs of other calls.
            Their inputs do not count when the number of samples is determined.
        unusual: Outputs of calls that received an input without an edge, or contain modules.
        faults: Errors that explain why per-sample quantities do not exist, each with its node.
        is_declared: Whether any call's samples were declared to lie on an axis other than 0.
        at_base: Outputs of calls that are visited at the tensor that they are views of.
        computed_from: By an output of a node, the call that computes several outputs from it.
        regions: The region in which each call lies.
        uses_inside: For each call, the operations inside that use parameters it owns: node,
            position of the edge, parameter.
        between: The nodes between calls, each with its region, in the order of the walk.
        loss_owners: The sample of each row that a loss received, where samples have several rows
            and ``subsampling`` chooses some samples.
        loss_rows: The same for all samples, where columns were split by row; ``None`` if unknown.
        sample_ids: The sample of each entry of a tensor, where it was asked for; see ``owners.py``.
        input_ids: The same of data that calls received; ``None`` if usual, or unknown.
        guessed: Tensors whose sample ids only lengths tell.
        are_moved: Whether any tensor may have its rows in another order than the model's
            input; ``None`` before it was asked for.
        are_by_values: Whether values of data say that rows are moved.
        read_at: Outputs of operations at which other values, such as an index, tell sample ids.
        looked_at: By an operation of parameters and data, the sample ids that the data told.
        compared: Calls that received rows that the model received, too, as their values say; with
            the rows that they were picked from, if they were.
        unclear: Calls that received rows picked from the data, of unknown samples.
        values_read: Whether values of tensors were compared to find the samples.
        is_unread: Whether an operation saved what would tell sample ids, and it may not be read.
        is_straight: Whether every call has a rule and its samples on axis 0, as a plan says.
    """

    beside: frozenset[tuple[Node, int]] = frozenset()
    tells_samples: bool = False
    shows_all: bool = True
    told: Told | None = None
    alignment: Alignment = field(default_factory=Alignment)
    bare: dict[int, Bare] = field(default_factory=dict)
    leaves: dict[tuple[Node, int], Site] = field(default_factory=dict)
    opened: set[Call] = field(default_factory=set)
    tables: set[Node] = field(default_factory=set)
    widest: int = 0
    outside: set[int] = field(default_factory=set)
    depth: int | None = None
    call_rows: dict[Node, Tensor] = field(default_factory=dict)
    axes: dict[tuple[Call, int], int] = field(default_factory=dict)
    computed: dict[Call, Mapping[tuple[Node, int], Tensor]] = field(default_factory=dict)
    handed: dict[tuple[Node, int], Tensor] = field(default_factory=computed_substitutes)
    received: dict[tuple[Call, int], int] = field(default_factory=dict)
    unruled_losses: set[Call] = field(default_factory=set)
    unusual: list[Site] = field(default_factory=list)
    faults: list[tuple[BackpackError, Node | None]] = field(default_factory=list)
    is_declared: bool = False
    at_base: set[tuple[Call, int]] = field(default_factory=set)
    computed_from: dict[tuple[Node, int], Call] = field(default_factory=dict)
    regions: dict[Call, Region] = field(default_factory=dict)
    uses_inside: dict[Call, list[tuple[Node, int, Tensor]]] = field(default_factory=dict)
    between: dict[tuple[Node, Region], None] = field(default_factory=dict)
    loss_owners: dict[tuple[Call, int], Tensor] = field(default_factory=dict)
    loss_rows: dict[tuple[Call, int], Tensor | None] = field(default_factory=dict)
    sample_ids: dict[tuple[Node, int], Tensor | None] = field(default_factory=dict)
    input_ids: dict[Call, Tensor | None] = field(default_factory=dict)
    guessed: set[tuple[Node, int]] = field(default_factory=set)
    are_moved: bool | None = None
    are_by_values: bool = False
    read_at: dict[tuple[Node, int], None] = field(default_factory=dict)
    looked_at: dict[Node, Tensor | None] = field(default_factory=dict)
    compared: dict[Call, Source | None] = field(default_factory=dict)
    unclear: set[Call] = field(default_factory=set)
    values_read: bool = False
    is_unread: bool = False
    is_straight: bool = False

    @property
    def why_unusual(self) -> str:
        """Why no plan can be made: a decision depends on more than shapes, settings and operations.

        Empty if a plan can be made.
        """
        reasons = {
            "numbers in tensors were read to tell where samples are": self.values_read,
            "data say which rows are whose": bool(self.are_moved and self.are_by_values),
            "indices say which rows are whose, and so does samples=": bool(
                self.read_at and self.is_told
            ),
            "a part of the rows is known": bool(self.call_rows),
            "samples were declared to lie on another axis": self.is_declared,
            "each item of a list is a sample's": self.depth is not None,
            "weights are handed over": bool(self.handed),
            "a view was overwritten in place": bool(self.viewed or self.at_base),
            "parameters are sharded": bool(self.shards),
            "a loss has no rule": bool(self.unruled_losses),
            "a quantity does not exist everywhere": bool(self.faults or self.beside),
        }
        return next((why for why, is_so in reasons.items() if is_so), "")

    @property
    def unheard(self) -> dict[NodeOutput, ModelRun]:
        """What models returned that called none of their modules, each with the run.

        Such a model has its parameters in modules that it only holds:
        ``F.linear(x, self.part.weight)``. If a loss is a part of the model, it is what the loss
        returned.
        """
        behind = {node: returned(node) for node, _ in self.between}
        found = {(node, nr): run for node, runs in behind.items() for nr, run in runs.items()}
        heard = set[int]()
        for site in self.sites.values():
            run = site.call.run
            # A loss that is extended by itself receives what models computed, and no samples.
            if not self.is_loss(site.call) or run.has_computed_input:
                heard.add(id(run.inputs))
            elif isinstance(run, ModelRun):
                found[site.edge[:2]] = run
        return {output: run for output, run in found.items() if id(run.inputs) not in heard}

    @property
    def is_told(self) -> bool:
        """Whether the given sample of each row differs from one sample for each row, in order."""
        return self.told is not None and not self.told.is_usual

    def may_read(self, node: Node) -> bool:
        """Whether the tensors that an operation saved may be read."""
        return self.is_readable or is_saved_plainly(node)

    def asks_rule(self, call: Call) -> bool:
        """Whether the rule of a call is asked for anything; see the base class."""
        is_asked = call not in self.opened or bool(self.trained[call])
        return super().asks_rule(call) and is_asked

    def site_at(self, edge: Edge) -> Site | None:
        """The output of a call at which a gradient sent along an edge arrives, if there is one."""
        if self.leaves and (leaf := self.leaves.get((edge.node, edge.output_nr))) is not None:
            return leaf
        if self.viewed and not edge.level:
            edge = self.viewed.get((edge.node, edge.output_nr), edge)
        site = site_at(edge)
        if site is not None and site.edge.level <= 0 and (site.call, site.index) in self.at_base:
            return None  # the call is visited at the tensor that its output is a view of
        return site

    def axis_and_positions(self, site: Site) -> tuple[int, int]:
        """The axis that holds the samples, and how many of its entries each sample has."""
        if self.is_straight:
            return 0, 1
        axis, alignment = self.axes.get((site.call, site.index), 0), self.alignment
        is_usual = site.layout is None and not (alignment.positions or alignment.faults)
        return axis, 1 if is_usual else alignment.positions_of(site, axis)

    def view(self, site: Site, kept: CallCaches, grad: Tensor | None = None) -> View:
        """Also set ``view.owners``, the sample of each row, where rows are in no usual order."""
        view = super().view(site, kept, grad)
        if site[:2] in self.loss_owners:
            view.owners = self.loss_owners[site[:2]]
        elif self.alignment.owned and not (view.positions or self.alignment.is_apart(site.edge)):
            owned = self.alignment.owned_of(site)
            view.owners = None if owned is None else owned.int().argmax(0)
        return view

    def sources(self, node: Node) -> list[str]:
        """The paths of the calls behind an operation, also through other operations."""

        def further(edge: Edge) -> list[Edge]:
            return self.further(edge) if self.site_at(edge) is None else []

        sent = [edge for _, edge in edges_behind(node)]
        sites = map(self.site_at, reached(sent, further))
        return list(dict.fromkeys(site.call.path for site in sites if site is not None))

    def add_leaf(self, site: Site) -> None:
        """Add the call that stands for a parameter."""
        self.leaves[site.edge.node, site.edge.output_nr] = site
        self.sites[site.call, site.index] = site
        self.axes[site.call, site.index] = 0
        self.note_uses(site.call)

    def note_uses(self, call: Call) -> None:
        """Count the uses of a call's parameters, also of those that its rule does not cover."""
        super().note_uses(call)
        for own in self.uncovered(call) if self.freed else ():
            has_children = bool({*call.module._modules.keys()} - {"parametrizations"})
            self.use_of(call, own).unruled += not has_children

    def parameters(self) -> dict[int, Tensor]:
        """All parameters that get results: those that calls use, and those that operations use."""
        parameters = super().parameters()
        for parameter, *_ in self.bare_of_models():
            if parameter.is_complex():
                raise complex_parameter(f"of shape {list(parameter.shape)}")
            parameters[id(parameter)] = parameter
        return parameters

    def note_bare(self, node: Node, position: int, parameter: Tensor) -> None:
        """Record that an operation uses a parameter outside of any module that owns it."""
        bare = self.bare.setdefault(id(parameter), Bare(parameter, node, {}))
        self.bare[id(parameter)] = bare._replace(node=node)
        bare.edges[node, position] = None

    def views_of(self, node: Node) -> list[tuple[Site, Layout]]:
        """Outputs of calls that are views of a node's outputs and were overwritten in place."""
        return [(s, s.layout) for s in self.sites.values() if s.edge.node is node and s.layout]

    def further(self, edge: Edge) -> list[Edge]:
        """The next edges: a call's inputs, a node's operands, or the inside of an opened call."""
        site = self.site_at(edge)
        if site is None:
            return [behind for _, behind in edges_behind(edge.node)]
        if site.call in self.opened:
            return [below(site)]
        return [behind for behind in site.call.edges if behind is not None]

    def disown(self, call: Call) -> None:
        """Read a call's parameters at the operations inside of it, and no longer at the call."""
        if trained := self.trained[call]:
            sites = sum(own is call for own, _ in self.sites)
            for own in trained:
                self.uses[id(own.parameter)].count -= sites
            self.trained[call], self.freed[call] = (), (*self.freed.get(call, ()), *trained)
        for node, position, parameter in self.uses_inside.get(call, ()):
            self.note_bare(node, position, parameter)

    def bare_of_models(self) -> list[Bare]:
        """Parameters that operations use and that belong to an extended model."""
        # A parameter that a call used may have been replaced in its module since.
        owned = owned_by_models().keys() | self.uses.keys() if self.bare else ()
        return [bare for key, bare in self.bare.items() if key in owned]

    def uncovered(self, call: Call) -> list[Trained]:
        """The trained parameters of a call that no rule covers."""
        rule, module = call.rule, call.module
        return [own for own in self.freed.get(call, ()) if not rule.covers(module, own.name)]

    def is_loss(self, call: Call) -> bool:
        """Whether a call is that of a loss, with or without a loss rule."""
        return call.rule.is_loss or call in self.unruled_losses

    @property
    def planned_tensors(self) -> list[Tensor]:
        """The tensors that the plan of a pass determines."""
        known = [*self.alignment.owned.values(), *self.loss_owners.values()]
        known += [] if self.told is None else [self.told.rows]
        others = [*self.loss_rows.values(), *self.sample_ids.values()]
        return known + [ids for ids in others if ids is not None]

    def runs_of(self, calls: Iterable[Call]) -> list[Run]:
        """The runs of models that hold some calls, each once, and all that called no module."""
        runs: tuple[Run, ...] = (*(call.run for call in calls), *self.unheard.values())
        return [*{id(run): run for run in runs}.values()]

    def fit_told(self) -> None:
        """Fit the index that the user gave to what models received.

        Raises:
            UsageError: It does not fit.
        """
        if self.told is not None:
            runs = self.runs_of(call for call, _ in self.sites if not self.is_loss(call))
            self.told = self.told.fitting(run for run in runs if not run.has_computed_input)

    def leave_out(self, call: Call) -> None:
        """Mark the uncovered parameters of a call as not wanted by any extension."""
        for key in (id(own.parameter) for own in self.uncovered(call)):
            self.uses[key].is_wanted = False
            self.bare.pop(key, None)

    def disown_all_of_leaves(self) -> None:
        """Disown opened calls whose parameters are also read where operations use them.

        Otherwise what the operations inside send to such a parameter would be counted twice. To
        disown one call adds parameters to ``bare``, which may concern further calls.
        """
        shared = [*self.uses_inside]
        while shared:
            reading = [call for call in self.uses_inside if self.trained[call]]
            shared = [
                c for c in reading if any(id(p) in self.bare for *_, p in self.uses_inside[c])
            ]
            for call in shared:
                self.disown(call)


def edges_behind(node: Node) -> list[tuple[int, Edge]]:
    """The edges along which a node sends gradients, with positions in ``node.next_functions``."""
    new, children = tuple.__new__, enumerate(node.next_functions)  # much faster than Edge(...)
    edges = [(i, new(Edge, (child, nr, 0))) for i, (child, nr) in children if child is not None]
    if type(node) is CopyNode and edges and not edges[0][0]:
        # An in-place operation on a view changes the base, below all views that calls returned.
        child, output_nr, _ = edges[0][1]
        edges[0] = 0, Edge(child, output_nr, len(viewed_at(child, output_nr)))
    return edges
