"""Walks the whole graph of a backward pass before anything is computed.

Only from above can one see a parameter that several calls use, or that a plain function uses, too;
calls that disagree about the batch; an operation that mixes samples. Calls with a rule are stepped
over, so the walk costs a visit of each call, and of each node between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core._torch import CopyNode, Node, has_memory
from backpack_core.errors import BackpackError
from backpack_core.graph import faults, nodes
from backpack_core.graph.alignment import Alignment
from backpack_core.graph.batch import batch_of, declared_axis
from backpack_core.graph.parameters import Trained, complex_parameter, trained_in
from backpack_core.record.call import Call, Edge, Kept, Layout, Site, is_noted, site_at, viewed_at
from backpack_core.record.view import View


@dataclass
class Use:
    """A parameter, and at how many sites calls use it."""

    parameter: Tensor
    count: int


class Region(NamedTuple):
    """The inside of a call that has no rule for propagation, as it is walked through."""

    call: Call
    parent: Region | None


@dataclass
class Survey:
    """What is known about the graph of one backward pass.

    Attributes:
        beside: Outputs of nodes that are left out, with everything behind them.
        alignment: Where samples lie in it.
        batch_size: Number of samples, the same in every call.
        is_shared: Whether a parameter is used several times.
        widest: Bytes that one column takes at the widest call.
        weights: Bytes of the parameters.
        sites: Every output of a call that is in the graph, as (call, index).
        axes: Which axis of such an output holds the samples.
        trained: What those calls are read off at.
        uses: The parameters that they use, by ``id``.
        bare: Parameters that operations outside of owning modules use, by ``id``; one such node.
        bare_edges: The same by node, and position of the edge.
        leaves: Parameters that are looked at as calls, by the node that takes their gradient.
        disowned: Calls whose parameters are looked at where operations use them.
        freed: Their modules and names, by ``id``.
        opened: Calls that are gone through node by node though they have a rule.
        viewed: Outputs of nodes that are reached past the views that modules returned of them, with
            the edge of the outermost; by node and output number.
        received: How long axis 0 is of what a call received and returned; -1 if these differ.
        unusual: Outputs of calls that received something that has no edge, or have modules inside.
        recursive: Calls in which their module is called again: to run one again counts both.
        shards: What a process holds of parameters that calls use whole, by these.
        faults: Why quantities of single samples do not exist, and where.
        is_declared: Whether samples are said to lie on another axis than the first, somewhere.
        structure: What tells it from other graphs, once somebody has asked; see ``trust.py``.
    """

    beside: frozenset[tuple[Node, int]] = frozenset()
    alignment: Alignment = field(default_factory=Alignment)
    batch_size: int = 0
    is_shared: bool = False
    widest: int = 0
    weights: int = 0
    sites: dict[tuple[Call, int], Site] = field(default_factory=dict)
    axes: dict[tuple[Call, int], int] = field(default_factory=dict)
    trained: dict[Call, tuple[Trained, ...]] = field(default_factory=dict)
    uses: dict[int, Use] = field(default_factory=dict)
    bare: dict[int, tuple[Tensor, Node]] = field(default_factory=dict)
    bare_edges: dict[tuple[Node, int], Tensor] = field(default_factory=dict)
    viewed: dict[tuple[Node, int], Edge] = field(default_factory=dict)
    leaves: dict[Node, Site] = field(default_factory=dict)
    opened: set[Call] = field(default_factory=set)
    disowned: set[Call] = field(default_factory=set)
    freed: dict[int, tuple[Module, str]] = field(default_factory=dict)
    received: dict[tuple[Call, int], int] = field(default_factory=dict)
    unusual: list[Site] = field(default_factory=list)
    recursive: set[Call] = field(default_factory=set)
    shards: dict[Tensor, Tensor] = field(default_factory=dict)
    faults: list[tuple[BackpackError, Node | None]] = field(default_factory=list)
    is_declared: bool = False
    structure: tuple[object, ...] | None = None
    _moved: set[tuple[Call, int]] = field(default_factory=set)
    _inner: dict[tuple[Node, int], Call] = field(default_factory=dict)
    _regions: dict[Call, Region | None] = field(default_factory=dict)
    _owned: dict[Call, list[tuple[Node, int, Tensor]]] = field(default_factory=dict)
    seen: dict[tuple[Node, Region | None], None] = field(default_factory=dict)  # in order

    def add(self, edges: Iterable[Edge]) -> None:
        """Walk everything behind some edges; what is known already is not walked again."""
        self._walk([(edge, None) for edge in edges])
        for place in self._inner.keys() & self.viewed.keys():
            self.faults.append((faults.changed_output(self._inner[place]), None))
        if not self.batch_size:
            self.batch_size = batch_of(self.received)

    def _walk(self, todo: list[tuple[Edge, Region | None]]) -> None:
        self.structure = None
        while todo:
            edge, region = todo.pop()
            if self.beside and edge[:2] in self.beside:
                continue
            if region is not None:
                if _is_parameter(edge, region):
                    continue
                region = _leave(edge, region)
            site = None
            if is_noted(edge.node):
                self._note_views(edge, region)
                site = self.site_at(edge)
            todo += self._pass(edge.node, region) if site is None else self._enter(site, region)

    def site_at(self, edge: Edge) -> Site | None:
        """The call that what is sent to an edge arrives at, in this graph."""
        if self.leaves and edge.node in self.leaves:
            return self.leaves[edge.node]
        if self.viewed and not edge.level:
            edge = self.viewed.get((edge.node, edge.output_nr), edge)
        site = site_at(edge)
        if site is not None and site.edge.level <= 0 and (site.call, site.index) in self._moved:
            return None  # the call is visited at the tensor that its output is a view of
        return site

    def add_leaf(self, site: Site) -> None:
        """Look at a parameter as at a call that returns it."""
        self.leaves[site.edge.node] = site
        self.sites[site.call, site.index] = site
        self.axes[site.call, site.index] = 0
        self._note_uses(site.call)

    def is_moved(self, call: Call, index: int) -> bool:
        """Whether a call is visited at the tensor that its output is a view of."""
        return (call, index) in self._moved and (call, index) in self.sites

    def views_of(self, node: Node) -> list[tuple[Site, Layout]]:
        """Calls that returned views of a node's outputs, which were overwritten in place since."""
        return [(s, s.layout) for s in self.sites.values() if s.edge.node is node and s.layout]

    def _note_views(self, edge: Edge, region: Region | None) -> None:
        """See whether an output is reached past the views of it that modules returned."""
        place = (edge.node, edge.output_nr)
        views = () if edge.level or place in self.viewed else viewed_at(*place)
        for level, (call, _, layout) in reversed([*enumerate(views, start=1)]):
            if layout.is_whole and not call.is_released and call not in _calls(region):
                self._see_through(Edge(*place, level))
                break

    def _see_through(self, edge: Edge) -> None:
        self.viewed[edge.node, edge.output_nr] = edge
        for level in range(1, edge.level + 1):
            site = site_at(Edge(edge.node, edge.output_nr, level))
            if site is not None:
                self._moved.add((site.call, site.index))
                if (site.call, site.index) in self.sites:
                    self.sites[site.call, site.index] = site

    def _enter(self, site: Site, region: Region | None) -> list[tuple[Edge, Region | None]]:
        """Enter a call; returns where to go on."""
        call, index = site.call, site.index
        if (call, index) in self.sites or call.is_released:
            return []
        self.sites[call, index] = site
        self._regions[call] = region
        for around in _calls(region):
            if around.module._parameters is call.module._parameters and self.trained[around]:
                self.recursive.add(around)
        self._note_uses(call)
        self._check(site)
        if self.goes_inside(call):
            return [(site.below, Region(call, region))]
        return [(edge, region) for edge in call.edges if edge is not None]

    def _note_uses(self, call: Call) -> None:
        """Note which parameters a call uses."""
        trained = self.trained.get(call)
        if trained is None:
            trained = self.trained[call] = trained_in(call)
        for name, parameter, _, _ in trained:
            number = id(parameter)
            use = self.uses.get(number)
            if use is not None:
                self.is_shared |= use.count > 0
                use.count += 1
            elif parameter.is_complex():
                raise complex_parameter(f"{name!r} of {call.path}")
            else:
                self.uses[number] = Use(parameter, 1)
                self.weights += parameter.nbytes

    def _pass(self, node: Node, region: Region | None) -> list[tuple[Edge, Region | None]]:
        """Go through a node between calls; returns where to go on."""
        # Twice, where it is reached from inside an execution and from outside past its output.
        if (node, region) in self.seen:
            return []
        self.seen[node, region] = None
        further = []
        if nodes.is_nested(node):
            raise faults.nested_tensor(f"What the operation {nodes.described(node)!r} made", node)
        if nodes.mixes_samples(node):
            self.faults.append((faults.mixing_node(node), node))
        for position, edge in edges_behind(node):
            if nodes.is_leaf(edge.node):
                self._note_parameter(edge.node.variable, node, position, region)  # type: ignore[attr-defined]
                continue
            if edge.level:
                self._see_through(edge)
                edge = Edge(edge.node, edge.output_nr)
            if region is not None:
                self._note_use_inside(edge, node, region)
            further.append((edge, region))
        return further

    def _note_use_inside(self, edge: Edge, node: Node, region: Region) -> None:
        """Note what a call computes several outputs from, which may be changed in place later."""
        for call, *_ in viewed_at(edge.node, edge.output_nr):
            own = site_at(Edge(node, 0))
            if call in _calls(region) and (own is None or own.call is not call):
                self._inner.setdefault((edge.node, edge.output_nr), call)

    def _note_parameter(
        self, parameter: Tensor, node: Node, position: int, region: Region | None
    ) -> None:
        """Note a parameter, and which enclosing call owns it, if any."""
        for call in _calls(region):
            if any(parameter is own.parameter for own in self.trained[call]):
                self._owned.setdefault(call, []).append((node, position, parameter))
                return
        if isinstance(parameter, Parameter):
            self.bare[id(parameter)] = (parameter, node)
            self.bare_edges[node, position] = parameter

    def view(self, site: Site, kept: Kept, grad: Tensor | None = None) -> View:
        """What rules see at an output, with the gradient there and what calls have computed."""
        call, index, (node, *_), _ = site
        axis, positions = self.axes.get((call, index), 0), self.alignment.positions_of(site)
        return View(call, index, grad, node, axis, kept.setdefault(call, {}), positions)

    def goes_inside(self, call: Call) -> bool:
        """Whether what arrives at a call goes on through the nodes that made its output."""
        return call.goes_inside or call in self.opened

    def open(self, site: Site) -> None:
        """Have a call gone through node by node."""
        self.opened.add(site.call)
        self.axes.update((place, 0) for place in self.axes if place[0] is site.call)
        self.disown(site.call)
        self._walk([(site.below, Region(site.call, self._regions[site.call]))])

    def disown(self, call: Call) -> None:
        """Have nothing read off at a call: operations inside use its parameters, as any others."""
        if self.trained[call]:
            self.disowned.add(call)
        sites = sum(own is call for own, _ in self.sites)
        for name, parameter, *_ in self.trained[call]:
            self.uses[id(parameter)].count -= sites
            self.freed[id(parameter)] = call.module, name
        self.trained[call] = ()
        for node, position, parameter in self._owned.get(call, ()):
            self.bare[id(parameter)] = (parameter, node)
            self.bare_edges[node, position] = parameter

    def disown_all_of_leaves(self) -> None:
        """Disown calls that are gone through and use a parameter that is looked at by itself.

        What operations inside send to it arrives there, and would be read off at the call, too.
        """
        known = -1
        while known < len(self.disowned):
            known = len(self.disowned)
            for call, owned in self._owned.items():
                if any(id(p) in self.bare for *_, p in owned) and self.trained[call]:
                    self.disown(call)

    def _check(self, site: Site) -> None:
        call, index = site.call, site.index
        rule, stored, module = call.rule, call.stored, call.module
        output, inputs = stored.outputs[index], stored.inputs
        for tensor in (output, *inputs):
            if not has_memory(tensor):
                raise faults.nested_tensor(f"What {call.path} received or returned")
            self.widest = max(self.widest, tensor.nbytes)
        view = View(call, index)
        self.axes[call, index] = axis = rule.batch_axis(view, index)
        self.is_declared |= declared_axis(call) > 0
        if rule.mixes_samples(view):
            self.faults.append((faults.mixing_call(call), None))
        size = inputs[0].shape[0] if inputs and inputs[0].dim() else 0
        if not rule.is_loss and output.dim() and output.shape[axis : axis + 1] != (size,):
            size = -1
        self.received[call, index] = size
        if module._modules and not rule.transparent and (fault := faults.uncovered(call)):
            raise fault
        if module._modules or None in call.edges:
            self.unusual.append(site)

    @property
    def is_readable(self) -> bool:
        """Whether what autograd saved may be read by others, everywhere."""
        return all(call.is_readable for call, _ in self.sites)


def edges_behind(node: Node) -> list[tuple[int, Edge]]:
    """Where a node sends gradients: positions in ``node.next_functions``, and edges."""
    new, ways = tuple.__new__, enumerate(node.next_functions)  # much faster than Edge(...)
    found = [(i, new(Edge, (child, nr, 0))) for i, (child, nr) in ways if child is not None]
    if type(node) is CopyNode and found and not found[0][0]:
        # An operation in place on a view is one on the tensor behind.
        child, number, _ = found[0][1]
        found[0] = 0, Edge(child, number, len(viewed_at(child, number)))
    return found


def _is_parameter(edge: Edge, region: Region) -> bool:
    """Whether an edge leads to how a parameter of the enclosing call was computed.

    Under ``functional_call`` a parameter may be the result of a computation: then it is what gets
    the quantity, as a leaf would.
    """
    stored = region.call.stored
    used = [stored.owned[name][0] for name in stored.parameters]
    return any((t.grad_fn, t.output_nr) == edge[:2] for t in used)


def _calls(region: Region | None) -> Iterator[Call]:
    """The calls that a region lies in, innermost first."""
    while region is not None:
        yield region.call
        region = region.parent


def _leave(edge: Edge, region: Region | None) -> Region | None:
    """The enclosing call at an edge: the parent, where the inputs of the call begin."""
    while region and any(e and e[:2] == edge[:2] for e in region.call.edges):  # from anywhere
        region = region.parent
    return region
