"""What is known of a graph in which operations lie between calls, or samples on other axes.

``surveying.py`` finds it, ``aligning.py`` where samples lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.graph.parameters import Trained, complex_parameter
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Call, CallCaches, Edge, Layout, Site, site_at, viewed_at
from backpack_core.record.owner import computed_substitutes
from backpack_core.record.view import View
from backpack_operations._torch import CopyNode
from backpack_operations.alignment import Alignment
from backpack_operations.order import reached
from backpack_operations.owned import owned_by_models
from backpack_operations.told import Told
from backpack_operations.viewed import below

Region = tuple[Call, ...]  # calls that have no rule for propagation, each inside of the next


class Bare(NamedTuple):
    """A parameter that operations use, the last such node, and all with positions of the edges."""

    parameter: Tensor
    node: Node
    edges: dict[tuple[Node, int], None]


@dataclass
class GraphSurvey(Survey):
    """What is known about any graph.

    Attributes:
        beside: Outputs of nodes that are left out, with everything behind them.
        tells_samples: Whether anything is of single samples, or of more than a sum over them.
        told: Which samples rows belong to, where the user says so, or sums in the model.
        alignment: Where samples lie in it.
        tables: Nodes inside of calls that returned something that all samples share.
        depth: At which depth of what models received each item is one sample's; ``None`` if samples
            are in front of all.
        rows: The samples of calls that received some of them only, by the node of the output.
        axes: Which axis of such an output holds the samples.
        given: Parameters that are results of a computation, of calls that are gone through.
        handed: Those of all models, as ``functional_call`` hands them over.
        received: How long axis 0 is of what a call received and returned; -1 if these differ.
        losses: Calls without a rule that make a loss of what others returned: what they received
            tells no number of samples.
        unusual: Outputs of calls that received something that has no edge, or have modules inside.
        faults: Why quantities of single samples do not exist, and where.
        is_declared: Whether samples are said to lie on another axis than the first, somewhere.
        moved: Outputs of calls that are visited at the tensor that they are views of.
        inner: Calls that compute more from an output of a node, by that.
        regions: What calls lie in.
        owned: How operations inside of calls use parameters that these own: by nodes and positions.
        seen: Nodes between calls, and what they lie in, in order.
        entries: The sample of each row that a loss received, where samples have several and some
            are chosen.
        numbers: The samples that entries belong to, where somebody asked; see ``owners.py``.
        are_moved: Whether rows may be other samples than those of the model's input; ``None``
            before anybody asked.
        are_by_values: Whether any of these are told by numbers in tensors, as in an index.
        looked_at: What an operation of parameters and data has made of the rows of the data, where
            numbers in these tell.
        unclear: Calls that received rows picked from data, of which it is not known whose they are.
        has_read: Whether numbers in tensors were compared, to tell where samples are.
        is_straight: Whether a plan says that every call has a rule that sends on what arrives, and
            its samples on axis 0.
    """

    beside: frozenset[tuple[Node, int]] = frozenset()
    tells_samples: bool = False
    told: Told | None = None
    alignment: Alignment = field(default_factory=Alignment)
    bare: dict[int, Bare] = field(default_factory=dict)
    tables: set[Node] = field(default_factory=set)
    depth: int | None = None
    rows: dict[Node, Tensor] = field(default_factory=dict)
    axes: dict[tuple[Call, int], int] = field(default_factory=dict)
    given: dict[Call, Mapping[tuple[Node, int], Tensor]] = field(default_factory=dict)
    handed: dict[tuple[Node, int], Tensor] = field(default_factory=computed_substitutes)
    received: dict[tuple[Call, int], int] = field(default_factory=dict)
    losses: set[Call] = field(default_factory=set)
    unusual: list[Site] = field(default_factory=list)
    faults: list[tuple[BackpackError, Node | None]] = field(default_factory=list)
    is_declared: bool = False
    moved: set[tuple[Call, int]] = field(default_factory=set)
    inner: dict[tuple[Node, int], Call] = field(default_factory=dict)
    regions: dict[Call, Region] = field(default_factory=dict)
    owned: dict[Call, list[tuple[Node, int, Tensor]]] = field(default_factory=dict)
    seen: dict[tuple[Node, Region], None] = field(default_factory=dict)
    entries: dict[tuple[Call, int], Tensor] = field(default_factory=dict)
    numbers: dict[tuple[Node, int], Tensor | None] = field(default_factory=dict)
    are_moved: bool | None = None
    are_by_values: bool = False
    looked_at: dict[Node, Tensor | None] = field(default_factory=dict)
    unclear: set[Call] = field(default_factory=set)
    has_read: bool = False
    is_straight: bool = False

    @property
    def why_unusual(self) -> str:
        """What tells more of this graph than shapes, settings and operations; empty if nothing.

        That data are not a copy of others in another order counts as known.
        """
        found = {
            "samples=... says which rows are whose": self.told is not None,
            "numbers in tensors were read to tell where samples are": self.has_read,
            "indices or data say which rows are whose": bool(self.are_moved and self.are_by_values),
            "a part of the rows is known": bool(self.rows),
            "samples lie on another axis": self.is_declared or any(self.axes.values()),
            "each item of a list is a sample's": self.depth is not None,
            "weights are handed over": bool(self.handed),
            "a view was overwritten in place": bool(self.viewed or self.moved),
            "parameters are sharded": bool(self.shards),
            "a loss has no rule": bool(self.losses),
            "a quantity does not exist everywhere": bool(self.faults or self.owned or self.beside),
        }
        return next((why for why, is_so in found.items() if is_so), "")

    @property
    def is_told(self) -> bool:
        """Whether rows are said to be other samples than one each, in order."""
        return self.told is not None and not self.told.is_usual

    def site_at(self, edge: Edge) -> Site | None:
        """The call that what is sent to an edge arrives at, in this graph."""
        if self.leaves and (leaf := self.leaves.get((edge.node, edge.output_nr))) is not None:
            return leaf
        if self.viewed and not edge.level:
            edge = self.viewed.get((edge.node, edge.output_nr), edge)
        site = site_at(edge)
        if site is not None and site.edge.level <= 0 and (site.call, site.index) in self.moved:
            return None  # the call is visited at the tensor that its output is a view of
        return site

    def axis_and_positions(self, site: Site) -> tuple[int, int]:
        """As alignment and rules say."""
        if self.is_straight:
            return 0, 1
        axis, alignment = self.axes.get((site.call, site.index), 0), self.alignment
        is_usual = site.layout is None and not (alignment.positions or alignment.faults)
        return axis, 1 if is_usual else alignment.positions_of(site, axis)

    def view(self, site: Site, kept: CallCaches, grad: Tensor | None = None) -> View:
        """Also with whose the rows are, of a loss, or where they are in no order."""
        view = super().view(site, kept, grad)
        if site[:2] in self.entries:
            view.owners = self.entries[site[:2]]
        elif self.alignment.owned and not (view.positions or self.alignment.is_apart(site.edge)):
            owned = self.alignment.owned_of(site)
            view.owners = None if owned is None else owned.int().argmax(0)
        return view

    def sources(self, node: Node) -> list[str]:
        """Also through other operations."""

        def further(edge: Edge) -> list[Edge]:
            return self.further(edge) if self.site_at(edge) is None else []

        sent = [edge for _, edge in edges_behind(node)]
        sites = map(self.site_at, reached(sent, further))
        return list(dict.fromkeys(site.call.path for site in sites if site is not None))

    def add_leaf(self, site: Site) -> None:
        """Look at a parameter as at a call that returns it."""
        self.leaves[site.edge.node, site.edge.output_nr] = site
        self.sites[site.call, site.index] = site
        self.axes[site.call, site.index] = 0
        self.note_uses(site.call)

    def note_uses(self, call: Call) -> None:
        """Note which parameters a call uses, also those that its rule leaves out."""
        super().note_uses(call)
        for own in self.uncovered(call) if self.freed else ():
            is_alone = not {*call.module._modules.keys()} - {"parametrizations"}
            self.use_of(call, own).unruled += is_alone

    def parameters(self) -> dict[int, Tensor]:
        """Those that are read, and those of extended models that operations use."""
        found = super().parameters()
        for parameter, *_ in self.bare_of_models():
            if parameter.is_complex():
                raise complex_parameter(f"of shape {list(parameter.shape)}")
            found[id(parameter)] = parameter
        return found

    def note_bare(self, node: Node, position: int, parameter: Tensor) -> None:
        """Note a parameter that an operation uses outside of any module that owns it."""
        bare = self.bare.setdefault(id(parameter), Bare(parameter, node, {}))
        self.bare[id(parameter)] = bare._replace(node=node)
        bare.edges[node, position] = None

    def views_of(self, node: Node) -> list[tuple[Site, Layout]]:
        """Calls that returned views of a node's outputs, which were overwritten in place since."""
        return [(s, s.layout) for s in self.sites.values() if s.edge.node is node and s.layout]

    def further(self, edge: Edge) -> list[Edge]:
        """Where what is sent to an edge goes on: past a call with a rule, into others, by nodes."""
        site = self.site_at(edge)
        if site is None:
            return [behind for _, behind in edges_behind(edge.node)]
        if site.call in self.opened:
            return [below(site)]
        return [behind for behind in site.call.edges if behind is not None]

    def disown(self, call: Call) -> None:
        """Have nothing read off at a call: operations inside use its parameters, as any others."""
        if trained := self.trained[call]:
            sites = sum(own is call for own, _ in self.sites)
            for own in trained:
                self.uses[id(own.parameter)].count -= sites
            self.trained[call], self.freed[call] = (), (*self.freed.get(call, ()), *trained)
        for node, position, parameter in self.owned.get(call, ()):
            self.note_bare(node, position, parameter)

    def bare_of_models(self) -> list[Bare]:
        """Parameters that operations use, and extended models own.

        Of those that calls use, some may have been replaced in their module since.
        """
        own = owned_by_models().keys() | self.uses.keys() if self.bare else ()
        return [bare for key, bare in self.bare.items() if key in own]

    def uncovered(self, call: Call) -> list[Trained]:
        """The parameters of a call that its rule, if there is any, does not cover."""
        rule, module = call.rule, call.module
        return [own for own in self.freed.get(call, ()) if not rule.covers(module, own.name)]

    def is_loss(self, call: Call) -> bool:
        """Whether a call is that of a loss, whether a rule is known for it or not."""
        return call.rule.is_loss or call in self.losses

    def leave_out(self, call: Call) -> None:
        """Have nothing read off at the parameters of a call that has no rule."""
        for number in (id(own.parameter) for own in self.uncovered(call)):
            self.uses[number].is_wanted = False
            self.bare.pop(number, None)

    def disown_all_of_leaves(self) -> None:
        """Disown calls that are gone through and use a parameter that is looked at by itself.

        What operations inside send to it arrives there, and would be read off at the call, too.
        """
        found = [*self.owned]
        while found:
            known = [call for call in self.owned if self.trained[call]]
            found = [c for c in known if any(id(p) in self.bare for *_, p in self.owned[c])]
            for call in found:
                self.disown(call)


def edges_behind(node: Node) -> list[tuple[int, Edge]]:
    """Where a node sends gradients: positions in ``node.next_functions``, and edges."""
    new, ways = tuple.__new__, enumerate(node.next_functions)  # much faster than Edge(...)
    found = [(i, new(Edge, (child, nr, 0))) for i, (child, nr) in ways if child is not None]
    if type(node) is CopyNode and found and not found[0][0]:
        # An operation in place on a view is one on the tensor behind.
        child, number, _ = found[0][1]
        found[0] = 0, Edge(child, number, len(viewed_at(child, number)))
    return found
