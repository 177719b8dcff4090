"""Looks at the whole graph of a backward pass before anything is computed.

Some things can only be seen from above: a parameter that several calls use, or that is used by a
bare functional call as well; calls that disagree about the batch; an operation that mixes samples.
Calls with a rule are stepped over, so it costs a visit per call and per node between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from backpack_core._torch import COPY_SLICES, Node
from backpack_core.errors import (
    BackpackError,
    SampleMixingError,
    ShapeError,
    UnsupportedError,
)
from backpack_core.graph import nodes
from backpack_core.record.call import Call, Edge, Site, site_at, viewed_at
from backpack_core.record.view import View


@dataclass
class Use:
    """A parameter, and at how many sites calls use it."""

    parameter: Tensor
    count: int = 0


class Region(NamedTuple):
    """The inside of a call that has no rule for propagation, as it is walked through."""

    call: Call
    parent: Region | None


@dataclass
class Survey:
    """What is known about the graph of one backward pass.

    Attributes:
        batch_size: Number of samples, the same in every call.
        is_shared: Whether a parameter is used several times.
        widest: Bytes that one column takes at the widest call.
        weights: Bytes of the parameters.
        sites: Every output of a call that is in the graph, as (call, index).
        uses: The parameters that they use, by ``id``.
        bare: Parameters that operations outside of any owning module use, by ``id``, with the
            node of one such operation.
        viewed: Outputs of nodes that are reached past the views that modules returned of them, with
            the edge of the outermost; by node and output number.
        faults: Why quantities of single samples do not exist, and where.
    """

    batch_size: int = 0
    is_shared: bool = False
    widest: int = 0
    weights: int = 0
    sites: dict[tuple[Call, int], Site] = field(default_factory=dict)
    uses: dict[int, Use] = field(default_factory=dict)
    bare: dict[int, tuple[Parameter, Node]] = field(default_factory=dict)
    viewed: dict[tuple[Node, int], Edge] = field(default_factory=dict)
    faults: list[tuple[BackpackError, Node | None]] = field(default_factory=list)
    _moved: set[tuple[Call, int]] = field(default_factory=set)
    _inner: dict[tuple[Node, int], Call] = field(default_factory=dict)
    _owning: set[Call] = field(default_factory=set)
    _first: str = ""
    _seen: dict[tuple[Node, Region | None], None] = field(default_factory=dict)  # in order

    def add(self, edges: Iterable[Edge]) -> None:
        """Walk everything behind some edges; what is known already is not walked again."""
        todo: list[tuple[Edge, Region | None]] = [(edge, None) for edge in edges]
        while todo:
            edge, region = todo.pop()
            if _is_parameter(edge, region):
                continue
            region = _leave(edge, region)
            self._note_views(edge, region)
            site = self.site_at(edge)
            todo += self._enter(site, region) if site else self._pass(edge.node, region)
        for place in self._inner.keys() & self.viewed.keys():
            self._fault(_changed_output(self._inner[place]))

    def site_at(self, edge: Edge) -> Site | None:
        """The call that what is sent to an edge arrives at, in this graph."""
        outer = None if edge.level else self.viewed.get((edge.node, edge.output_nr))
        site = site_at(edge if outer is None else outer)
        if site is not None and site.edge.level <= 0 and (site.call, site.index) in self._moved:
            return None  # the call is visited at the tensor that its output is a view of
        return site

    def _note_views(self, edge: Edge, region: Region | None) -> None:
        """See whether an output is reached past the views of it that modules returned."""
        place = (edge.node, edge.output_nr)
        if edge.level or place in self.viewed:
            return
        level, entered = 0, list(_calls(region))
        for position, (call, _, layout) in enumerate(viewed_at(*place), start=1):
            if call not in entered and not call.is_released and layout.is_whole:
                level = position
        if level:
            self._see_through(Edge(*place, level))

    def _see_through(self, edge: Edge) -> None:
        self.viewed[edge.node, edge.output_nr] = edge
        for level in range(1, edge.level + 1):
            site = site_at(Edge(edge.node, edge.output_nr, level))
            if site is not None:
                self._moved.add((site.call, site.index))
                if (site.call, site.index) in self.sites:
                    self.sites[site.call, site.index] = site

    def _enter(self, site: Site, region: Region | None) -> Iterator[tuple[Edge, Region | None]]:
        """Enter a call; yield where to go on."""
        call, index = site.call, site.index
        if (call, index) in self.sites or call.is_released:
            return
        self.sites[call, index] = site
        stored = call.stored
        self.widest = max(self.widest, *(t.nbytes for t in (stored.outputs[index], *stored.inputs)))
        for name, tensor, *_ in parameters_of(call):
            refuse_complex(tensor, f"{name!r} of {call.path}")
            self._owning.add(call)
            use = self.uses.setdefault(id(tensor), Use(tensor))
            self.weights += 0 if use.count else tensor.nbytes
            use.count += 1
            self.is_shared |= use.count > 1
        self._check(call, index)
        if call.goes_inside:
            yield site.below, Region(call, region)
        else:
            for edge in call.edges:
                if edge is not None:
                    yield edge, region

    def _pass(self, node: Node, region: Region | None) -> Iterator[tuple[Edge, Region | None]]:
        """Go through a node between calls."""
        # Twice, where it is reached from inside an execution and from outside past its output.
        if (node, region) in self._seen:
            return
        self._seen[node, region] = None
        if nodes.mixes_samples(node):
            self.faults.append((_mixing_node(node), node))
        for _, edge in edges_behind(node):
            if nodes.is_leaf(edge.node):
                self._note_parameter(edge.node.variable, node, region)  # type: ignore[attr-defined]
                continue
            if edge.level:
                self._see_through(edge)
                edge = Edge(edge.node, edge.output_nr)
            self._note_use_inside(edge, node, region)
            yield edge, region

    def _note_use_inside(self, edge: Edge, node: Node, region: Region | None) -> None:
        """Note what a call computes several outputs from, which may be changed in place later."""
        enclosing = list(_calls(region))
        for call, *_ in viewed_at(edge.node, edge.output_nr):
            own = site_at(Edge(node, 0))
            if call in enclosing and (own is None or own.call is not call):
                self._inner.setdefault((edge.node, edge.output_nr), call)

    def _note_parameter(self, parameter: Tensor, node: Node, region: Region | None) -> None:
        """Note a parameter that no enclosing call owns."""
        for call in _calls(region):
            if any(parameter is own.parameter for own in parameters_of(call)):
                return
        if isinstance(parameter, Parameter):
            self.bare[id(parameter)] = (parameter, node)

    def _check(self, call: Call, index: int) -> None:
        self._fault(_uncovered(call))
        self._fault(_mixing_call(call, index))
        stored = call.stored
        if not stored.inputs:
            if any(True for _ in parameters_of(call)):
                self._fault(_without_inputs(call))
            return
        size = stored.inputs[0].shape[0] if stored.inputs[0].dim() else 0
        output, axis = stored.outputs[index], call.rule.batch_axis(View(call, index), index)
        is_loss = call.rule.is_loss or output.dim() == 0
        if not is_loss and (axis >= output.dim() or output.shape[axis] != size):
            self._fault(_moved_batch(call, size, output))
        if not self._first:
            self.batch_size, self._first = size, call.path
        elif size != self.batch_size:
            self._fault(self._other_batch(call, size))

    def _fault(self, error: BackpackError | None) -> None:
        if error is not None:
            self.faults.append((error, None))

    def fault(self) -> BackpackError | None:
        """The first fault that concerns an extended module: its own, or of a node after it."""
        for error, node in self.faults:
            if node is None or self._leads_to_parameters(node):
                return error
        return None

    def names(self) -> Iterator[str]:
        """Names of the nodes between calls."""
        return (node.name() for node, _ in self._seen)

    @property
    def is_readable(self) -> bool:
        """Whether what autograd saved may be read by others, everywhere."""
        return all(call.is_readable for call, _ in self.sites)

    def nonlinear(self) -> list[Node]:
        """Nodes between calls, with parameters behind them, that are not known to be linear."""
        between = dict.fromkeys(node for node, _ in self._seen)
        return [n for n in between if not nodes.is_linear(n) and self._leads_to_parameters(n)]

    def _leads_to_parameters(self, start: Node) -> bool:
        """Whether any trained parameter lies behind a node; calls may have been released since."""
        seen: set[Edge] = set()
        todo = [edge for _, edge in edges_behind(start)]
        while todo:
            edge = todo.pop()
            if edge in seen:
                continue
            seen.add(edge)
            site = self.site_at(edge)
            if isinstance(getattr(edge.node, "variable", None), Parameter):
                return True
            if site is None:
                todo += [behind for _, behind in edges_behind(edge.node)]
            elif site.call in self._owning:
                return True
            elif site.call.goes_inside:
                todo.append(site.below)
            else:
                todo += [behind for behind in site.call.edges if behind is not None]
        return False

    def sources(self, node: Node) -> list[str]:
        """The calls whose outputs an operation works on, through other operations: their paths."""
        found: dict[str, None] = {}
        todo, seen = [node], {node}
        while todo:
            for _, edge in edges_behind(todo.pop()):
                site = self.site_at(edge)
                if site is not None:
                    found[site.call.path] = None
                elif edge.node not in seen:
                    seen.add(edge.node)
                    todo.append(edge.node)
        return list(found)

    def _other_batch(self, call: Call, size: int) -> BackpackError:
        return ShapeError(
            f"{call.path} received a batch of {size}, but {self._first} one of "
            f"{self.batch_size}: the first dimension must be the samples in every module. Where "
            "positions were merged into the batch (as in logits.flatten(0, 1)), keep them as extra "
            "dimensions: Linear takes [N, T, D], CrossEntropyLoss [N, C, T]."
        )


def edges_behind(node: Node) -> Iterator[tuple[int, Edge]]:
    """Where a node sends gradients: positions in ``node.next_functions``, and edges."""
    is_copy = node.name() == COPY_SLICES
    for position, (child, number) in enumerate(node.next_functions):
        if child is not None:
            # An operation in place on a view is one on the tensor behind.
            level = len(viewed_at(child, number)) if is_copy and not position else 0
            yield position, Edge(child, number, level)


class Trained(NamedTuple):
    """A parameter that a call reads off.

    Attributes:
        name: What the module calls it.
        parameter: What gets the quantity.
        used: What the module used: that parameter, or what it computed from it.
        is_covered: Whether the rule covers it.
    """

    name: str
    parameter: Tensor
    used: Tensor
    is_covered: bool


def parameters_of(call: Call) -> Iterator[Trained]:
    """The parameters that a call reads off."""
    stored = call.stored
    for name in stored.parameters:
        tensor, _ = stored.owned[name]
        if tensor.requires_grad:
            is_covered = call.rule.covers(call.module, name)
            for parameter in stored.computed.get(name, (tensor,)):
                yield Trained(name, parameter, tensor, is_covered)


def refuse_complex(parameter: Tensor, name: str) -> None:
    """Raise for a trained parameter of complex numbers.

    Raises:
        UnsupportedError: It is one.
    """
    if parameter.is_complex():
        raise UnsupportedError(
            f"The parameter {name} is complex, and quantities are defined for real parameters "
            "only: train its real and its imaginary part as two parameters, or freeze it."
        )


def _is_parameter(edge: Edge, region: Region | None) -> bool:
    """Whether an edge leads to how a parameter of the enclosing call was computed.

    Under ``functional_call`` a parameter may be the result of a computation: then it is what gets
    the quantity, as a leaf would.
    """
    if region is None:
        return False
    owned, names = region.call.stored.owned, region.call.stored.parameters
    return any(
        owned[n][0].grad_fn is edge.node and owned[n][0].output_nr == edge.output_nr for n in names
    )


def _calls(region: Region | None) -> Iterator[Call]:
    """The calls that a region lies in, innermost first."""
    while region is not None:
        yield region.call
        region = region.parent


def _leave(edge: Edge, region: Region | None) -> Region | None:
    """The enclosing call at an edge: the parent, where the inputs of the call begin."""
    while region is not None and any(
        e is not None and e.node is edge.node and e.output_nr == edge.output_nr
        for e in region.call.edges
    ):
        region = region.parent
    return region


def _mixing_node(node: Node) -> BackpackError:
    return SampleMixingError(
        f"The graph contains a batch normalisation in train mode ({node.name()}): every "
        "sample influences every other, so per-sample quantities do not exist. Call "
        "model.eval(), or use GroupNorm or LayerNorm."
    )


def _mixing_call(call: Call, index: int) -> BackpackError | None:
    if not call.rule.mixes_samples(View(call, index)):
        return None
    return SampleMixingError(
        f"{call.path} makes every sample of the batch influence every other (a batch "
        "normalisation in train mode does), so per-sample quantities do not exist. Call "
        "model.eval(), or use a layer that treats samples one by one, as GroupNorm."
    )


def _without_inputs(call: Call) -> BackpackError:
    return UnsupportedError(
        f"{call.path} has parameters but receives no tensor (a parametrization, say), "
        "so there is no batch axis to tell samples apart by. Remove the "
        "parametrization, or freeze its parameters."
    )


def _moved_batch(call: Call, size: int, output: Tensor) -> BackpackError:
    return ShapeError(
        f"{call.path} received {size} samples (axis 0 of its input) and returned a tensor "
        f"of shape {list(output.shape)}: it moves or merges the batch axis, so samples "
        "cannot be told apart. Keep samples on axis 0 of every module."
    )


def _changed_output(call: Call) -> BackpackError:
    return UnsupportedError(
        f"An output of {call.path} was changed in place, and its other outputs are computed from "
        "it: what reaches it from outside cannot be told from what reaches it from inside. Use an "
        "out-of-place operation."
    )


def _uncovered(call: Call) -> BackpackError | None:
    """Refuse a call whose parts have parameters that nobody would look at."""
    if call.rule.transparent or not call.module._modules:
        return None
    behind = {id(leaf) for leaves in call.stored.computed.values() for leaf in leaves}
    for name, parameter in call.module.named_parameters():
        is_known = name in call.stored.parameters or id(parameter) in behind
        if parameter.requires_grad and not is_known:
            return UnsupportedError(
                f"{call.path} has the trained parameter {name!r}, which the rule "
                f"{type(call.rule).__name__} knows nothing of. If it belongs to a "
                "parametrization, remove that (torch.nn.utils.parametrize."
                "remove_parametrizations), or freeze the parameter."
            )
    return None
