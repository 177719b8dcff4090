"""Recognises a recorded graph: where keys are equal, the same is decided about graphs.

One walk from the roots notes whatever a decision may depend on: settings of modules, types of the
operations between them, shapes, what is frozen, what is shared. No number in a tensor is among it.
Some graphs have no key: what was overwritten behind a view, or what hooks took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain, product, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_core._torch import LeafNode, Node
from backpack_core.record.call import SITES, VIEWED, Call, Edge, Site
from backpack_core.record.owner import PATH_ATTRIBUTE, is_parameter
from backpack_core.record.run import NO_RUN, NO_RUN_OF_RANKS, Run, span_of

Place = tuple[Node, int]
Region = tuple[Call, ...]  # calls that are gone through, each inside of the next
FactsOf = Callable[[Node], Iterable[Any]]

OVERWRITTEN = "a view was overwritten in place"
_STRIDED = torch.strided
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Unplanned(Exception):
    """No plan can tell what is decided about the graph; the message says why."""


class Structure:
    """A graph, and what tells it from others.

    Attributes:
        sites: Every output of a call, in the order of the walk.
        places: Every output of a node that was walked to, with its number.
        between: The nodes between calls, and inside of those without a rule, with their numbers.
        parameters: Those that calls and operations use, in the order in which they came up.
        key: Equal for graphs of equal shapes about which the same is decided.
    """

    def __init__(self, roots: Iterable[Edge], facts_of: FactsOf) -> None:
        """Walk the graph.

        Args:
            roots: What ``backward()`` is called on.
            facts_of: Returns what a decision about an operation may depend on, besides shapes.

        Raises:
            Unplanned: It has no key.
        """
        self._facts_of = facts_of
        self.sites: dict[tuple[Call, int], Site] = {}
        self.between: dict[Node, int] = {}
        self.parameters: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._run: Run | None = None
        self._regions: dict[Node, Region] = {}
        todo: list[tuple[Place, Region]] = [(edge[:2], ()) for edge in roots]
        self._facts: list[Any] = [len(todo)]
        self.places: dict[Place, int] = {}
        while todo:
            place, region = todo.pop()
            while region and any(e and e[:2] == place for e in region[0].edges):
                region = region[1:]  # its inputs begin
            if place in self.places:
                self._facts.append(self.places[place])
                if place[0] in self.between and self._regions.get(place[0], ()) != region:
                    raise Unplanned("an operation is reached from inside of a module and outside")
            else:
                self.places[place] = len(self.places)
                todo += self._enter(*place, region)
        self.key = tuple(self._facts)

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Lengths of axes, each with the number that stands for it in :attr:`form`."""
        shapes = (fact for fact in self.key if type(fact) is torch.Size)
        found = dict.fromkeys((0, 1, *chain(*shapes)))
        return {length: number for number, length in enumerate(found)}

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """What also graphs of other shapes have in common, about which the same is decided.

        Decisions compare lengths, and divide them by each other.
        """
        known, lengths = self.lengths.__getitem__, [*self.lengths]
        facts: list[Any]
        facts = [tuple(map(known, f)) if type(f) is torch.Size else f for f in self.key]
        facts += sorted(range(len(lengths)), key=lengths.__getitem__)
        facts += [n % m == 0 for n, m in product(lengths, lengths[2:])]
        return tuple(facts)

    def _enter(self, node: Node, number: int, region: Region) -> Iterable[tuple[Place, Region]]:
        """Note a call, or an operation; returns where to go on."""
        noted: Any = node.metadata
        if VIEWED in noted:
            for call, _, layout in noted[VIEWED].get(number, ()):
                if layout.is_whole and call not in region:
                    raise Unplanned(OVERWRITTEN)
        found = noted[SITES].get(number) if SITES in noted else None
        if found is None:
            return zip(self._pass(node, region), repeat(region))
        call, index = found
        self.sites[found] = Site(call, index, Edge(node, number))
        further = self._note(call, index)
        if call.rule.transparent:
            region = (call, *region)
            further = self._pass(node, region)
        return zip(further, repeat(region))

    # Calls ---------------------------------------------------------------------------------------

    def _note(self, call: Call, index: int) -> list[Place]:
        """What a call was: module, settings, shapes, types; returns where to go on."""
        if call.is_released or call.is_rewired or not call.is_readable:
            raise Unplanned(_why_unreadable(call))
        stored, facts, rule, module = call.stored, self._facts, call.rule, call.module
        # Rules live as long as the process.
        facts += type(module), id(rule), module.__dict__.get(PATH_ATTRIBUTE), index, call.training
        if not rule.transparent:
            facts.append(call.settings)
        facts += len(stored.inputs), len(stored.outputs)
        for tensor in (*stored.inputs, *stored.outputs):
            if tensor.layout is not _STRIDED or tensor.is_nested:
                raise Unplanned(f"{call.path} has nested or sparse tensors")
            facts += tensor.dtype, tensor.shape
        if stored.kwargs or stored.args is not stored.inputs:
            facts.append(_form((stored.args, stored.kwargs)))
        if stored.owned:
            self._note_parameters(call)
        run = call.run
        facts.append(2 if run is self._run else self._belongs_to(run))
        further: list[Place] = []
        for tensor, edge in zip(stored.inputs, call.edges, strict=True):
            facts.append(edge is None)
            if edge is None:
                facts += is_parameter(tensor), tensor.requires_grad, *self._received(call, tensor)
            elif edge.level:
                raise Unplanned(OVERWRITTEN)
            else:
                further.append(edge[:2])
        return further

    def _note_parameters(self, call: Call) -> None:
        """Which parameters a call used, and which of them want a gradient."""
        stored, facts = call.stored, self._facts
        if stored.computed:
            raise Unplanned(f"parameters of {call.path} are computed from others")
        facts += stored.parameters, tuple(stored.owned), tuple(stored.frozen)
        for name in stored.parameters:
            tensor, _ = stored.owned[name]
            facts += self._number_of(tensor), tensor.requires_grad, tensor.dtype
        if call.module._modules and not call.rule.transparent:  # it may leave out some inside
            facts.append(tuple([p.requires_grad for p in call.module.parameters()]))

    def _received(self, call: Call, tensor: Tensor) -> tuple[Any, ...]:
        """How data that a call received lie in what its model received."""
        run = call.run
        if not run.memories:
            return ()
        given = () if len(run.inputs) < 2 else tuple([g.span for g in run.inputs])
        return run.receives((tensor,)), *[span_of(tensor) == span for span in given]

    def _number_of(self, parameter: Tensor) -> int:
        """The number of a parameter, in the order in which they come up."""
        if type(parameter) is not Parameter and not isinstance(parameter, Parameter):
            raise Unplanned("weights are handed over")
        number = self._numbers.setdefault(id(parameter), len(self._numbers))
        if number == len(self.parameters):
            self.parameters.append(parameter)
        return number

    def _belongs_to(self, run: Run) -> int:
        """Whether a call belongs to no run of a model, or to the only one."""
        if run is NO_RUN or run is NO_RUN_OF_RANKS:
            return int(run.is_distributed)
        if self._run is None:
            self._run = run
            self._facts += run.axis, run.is_distributed, run.has_computed_input, len(run.inputs)
            self._facts.append(torch.Size(run.sizes))
            for given in run.inputs:
                self._facts += given.path, given.dtype, torch.Size(given.shape)
        if run is not self._run:  # which rows each has is told by memory
            raise Unplanned("a model was called several times")
        return 2

    # Operations ----------------------------------------------------------------------------------

    def _pass(self, node: Node, region: Region) -> list[Place]:
        """Note an operation; returns where to go on."""
        kind, facts = type(node), self._facts
        if node in self.between:
            facts += kind, self.between[node]
            return []
        self.between[node] = len(self.between)
        if region:
            self._regions[node] = region
        facts.append(kind)
        if kind is LeafNode:
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            facts += leaf.shape, leaf.dtype
            if is_parameter(leaf):
                facts.append(self._number_of(leaf))
            return []
        own = self._facts_of(node)
        for metadata in node._input_metadata:
            facts += metadata.dtype, torch.Size(metadata.shape)
        facts += own
        edges = node.next_functions
        facts.append(tuple([child is None for child, _ in edges]))
        return [(child, number) for child, number in edges if child is not None]


def _why_unreadable(call: Call) -> str:
    if call.is_rewired:
        return OVERWRITTEN
    if call.is_released:
        return "a part of the graph was freed"
    return "hooks take what autograd saves, as those of a checkpoint do"


def _form(value: Any) -> Any:
    """Arguments with their tensors left out.

    Raises:
        Unplanned: Something among them says more than its type.
    """
    if isinstance(value, Tensor):
        return Tensor
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return dict, tuple([(key, _form(item)) for key, item in value.items()])
    if type(value) in (tuple, list):
        return type(value), tuple(map(_form, value))
    raise Unplanned(f"a module received a {type(value).__name__}")
