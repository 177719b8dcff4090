"""The plain gradient of the parameters: autograd's, a sum of what was read for others, or nothing.

Autograd forms the gradient of every weight, a third of a plain pass, and individual gradients
contain it. A pass that is told what it has to reach, by ``inputs=``, leaves that work out at all
others. So the forward pass is the usual one, autograd is told to reach every call and every leaf
but those whose gradient comes from a product, and what comes from there goes through autograd's
engine again, for hooks and accumulation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from backpack_core import _torch
from backpack_core._hooks import hook_leaf_first
from backpack_core._torch import Node
from backpack_core.contract.column_propagator import OutputGradient
from backpack_core.contract.operations import (
    batch_sum,
    dense,
    has_free_sum,
    square_sum,
    squared_norm,
)
from backpack_core.contract.product import SampleProduct
from backpack_core.engine.groups import Group
from backpack_core.engine.trust import is_round, known_of
from backpack_core.errors import BackpackWarning, UsageError, warn_once
from backpack_core.graph.order import behind
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Edge

Key = tuple[int, str]  # a site's number in the walk, and what its module calls a parameter

_PRECISE = (torch.float32, torch.float64)  # sums in half precision are not autograd's


@dataclass
class Sums:
    """What is known of one structure.

    Attributes:
        passes: How many passes had it.
        known: Parameters whose gradient is the sum of their products, by the keys of their uses.
    """

    passes: int = 0
    known: set[Key] = field(default_factory=set)


class _Candidate(NamedTuple):
    """A parameter all of whose uses are read by products."""

    parameter: Tensor
    keys: tuple[Key, ...]


class PlainGradient:
    """What one pass does about it.

    Attributes:
        group: The extensions of individual gradients, whose products have the sums.
    """

    def __init__(self, survey: Survey, group: Group, edges: Sequence[Edge]) -> None:
        """Decide.

        In the passes 1, 2, 4, 8, … of a structure autograd computes everything, and what would have
        been shared is compared with it.

        Args:
            survey: What is known about the graph.
            group: See the class.
            edges: What ``backward()`` is called on.
        """
        self.group = group
        self._needs = group.needs | {batch_sum}
        self._edges = edges
        self._survey = survey
        self._sums: dict[int, Tensor] = {}
        self._sums_of = known_of(survey, Sums, group.needs)
        self._sums_of.passes += 1
        self._handles: list[Any] = []
        self._judged: dict[int, _Candidate] = {}
        self._left: dict[int, Tensor] = {}
        for candidate in _candidates(survey):
            number = id(candidate.parameter)
            if is_round(self._sums_of.passes):
                self._judged[number] = candidate
            elif self._sums_of.known.issuperset(candidate.keys):
                self._left[number] = candidate.parameter

    def begin(self) -> dict[str, Any]:
        """What to tell autograd, by the names of its arguments."""
        this = weakref.ref(self)
        for candidate in self._judged.values():
            hook = partial(_judge, this, candidate)
            self._handles.append(hook_leaf_first(candidate.parameter, hook))
        return inputs_without(self._left, self._survey, self._edges) if self._left else {}

    def needs(self, group: Group, parameter: Tensor) -> frozenset[Any] | None:
        """What is asked of a parameter's product, if its sum may be taken; else ``None``."""
        if group.first is not self.group.first:  # what measures a pass may read along
            return None
        number = id(parameter)
        return self._needs if number in self._left or number in self._judged else None

    def take(self, parameter: Tensor, whole: SampleProduct, is_reached: bool) -> None:
        """Sum a product, which all who asked for it have read.

        Args:
            parameter: The parameter.
            whole: The product, of all uses.
            is_reached: Whether any gradient arrives; where none does, autograd stores none.
        """
        number = id(parameter)
        if number in self._judged and not has_free_sum(whole):
            return
        if not is_reached:
            self._left.pop(number, None)
            return
        is_known = batch_sum in self.group.needs  # somebody may have stored it
        total = batch_sum(whole).squeeze(0)
        self._sums[number] = total.clone() if is_known else total

    def judge(self, candidate: _Candidate, gradient: Tensor) -> None:
        """Compare a sum with what autograd brings."""
        total = self._sums.pop(id(candidate.parameter), None)
        if total is None or not total.numel():
            return
        size = float(gradient.detach().abs().max())
        if not size:
            return
        allowed = size * torch.finfo(gradient.dtype).eps ** 0.6
        if float((total - gradient).detach().abs().max()) <= allowed:
            self._sums_of.known.update(candidate.keys)
        else:
            self._sums_of.known.difference_update(candidate.keys)

    def leave(self) -> None:
        """The pass is over, however it ended."""
        for handle in self._handles:
            handle.remove()

    def deliver(self) -> None:
        """Hand the sums to autograd, which calls hooks and accumulates."""
        assert self._left.keys() <= self._sums.keys(), "a gradient was left out that nobody summed"
        parameters = list(self._left.values())
        sums = [self._sums.pop(number) for number in self._left]
        if sums:
            with torch.enable_grad():
                root = _Sums.apply(sums, *parameters)  # type: ignore[no-untyped-call]
            root.backward()


class _Sums(torch.autograd.Function):
    """A number whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, sums: list[Tensor], *parameters: Tensor) -> Tensor:
        """Keep them."""
        ctx.sums = sums
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Let go of them: what nobody else holds is stored without a copy."""
        sums = tuple(ctx.sums)
        ctx.sums.clear()
        return (None, *sums)


def plan(
    survey: Survey,
    groups: Iterable[Group],
    edges: Sequence[Edge],
    options: Mapping[str, Any],
) -> PlainGradient | None:
    """What is done where sums are shared; ``None`` where autograd does everything.

    Args:
        survey: What is known about the graph.
        groups: The extensions.
        edges: What ``backward()`` is called on.
        options: The arguments of ``backward()``.
    """
    group = next((g for g in groups if _has_individual(g)), None)
    if group is None or not can_be_narrowed(survey, options, edges):
        return None
    if options.get("create_graph"):
        _say("create_graph=True asks for gradients with a graph")
        return None
    return PlainGradient(survey, group, edges)


def without_gradients(
    survey: Survey, edges: Sequence[Edge], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What to tell autograd, so that parameters with quantities get no gradient.

    Args:
        survey: What is known about the graph.
        edges: What ``backward()`` is called on.
        options: The arguments of ``backward()``.

    Raises:
        UsageError: The model is inside DistributedDataParallel.
    """
    if any(call.is_distributed for call in survey.trained):
        raise UsageError(
            "gradient='none' leaves gradients out, and DistributedDataParallel waits for them: use "
            "gradient='shared', or pass the model itself, which it wraps, its inputs."
        )
    if not can_be_narrowed(survey, options, edges):
        return {}
    return inputs_without({n: use.parameter for n, use in survey.uses.items()}, survey, edges)


def inputs_without(
    left: Mapping[int, Tensor], survey: Survey, edges: Sequence[Edge]
) -> dict[str, Any]:
    """``inputs=`` of a pass that reaches every call and every leaf but some.

    Args:
        left: The parameters that get no gradient, by ``id``.
        survey: What is known about the graph.
        edges: What ``backward()`` is called on.
    """
    nodes = [node for node in _nodes(edges) if isinstance(node, _torch.LeafNode)]
    inputs = [node for node in nodes if id(node.variable) not in left]
    if len(inputs) == len(nodes):
        return {}
    sites = {(site.edge.node, site.edge.output_nr) for site in survey.sites.values()}
    places = [*((node, 0) for node in inputs), *sites]
    return {"inputs": [GradientEdge(node, number) for node, number in places]}


def _candidates(survey: Survey) -> Iterator[_Candidate]:
    """Parameters that are read by products wherever they are used."""
    found: dict[int, list[Key]] = {}
    parameters: dict[int, Tensor] = {}
    for number, (call, index) in enumerate(survey.sites):
        dtype = call.stored.outputs[index].dtype
        for name, parameter, used, is_covered in survey.trained[call]:
            is_plain = parameter is used and parameter.is_leaf
            if is_covered and is_plain and parameter.dtype is dtype and dtype in _PRECISE:
                found.setdefault(id(parameter), []).append((number, name))
                parameters[id(parameter)] = parameter
    for key, keys in found.items():
        is_every = len(keys) == survey.uses[key].count and key not in survey.bare
        if is_every and parameters[key] not in survey.shards:
            yield _Candidate(parameters[key], tuple(keys))


def _has_individual(group: Group) -> bool:
    """Whether a group may form individual gradients, at once or in pieces, of all samples."""
    return (
        isinstance(group.propagator, OutputGradient)
        and group.propagator.subsampling is None
        and not group.has_overrides
        and bool(group.needs & {dense, square_sum, squared_norm})
    )


def can_be_narrowed(survey: Survey, options: Mapping[str, Any], edges: Sequence[Edge]) -> bool:
    """Whether autograd can be told what to reach; where the user did, that holds."""
    if options.get("inputs") is not None:
        return False
    if survey.viewed:
        _say("the output of a module was changed in place behind a view of it")
    elif not survey.is_readable:
        _say("autograd saves tensors through hooks (a checkpoint does)")
    elif any(isinstance(node, _torch.REENTRANT) for node in _nodes(edges)):
        _say("re-entrant checkpoints take no inputs=")
    else:
        return True
    return False


def _nodes(edges: Sequence[Edge]) -> set[Node]:
    """Every node behind some edges."""
    starts = {edge.node for edge in edges}
    return starts | behind(starts)


def _judge(this: Any, candidate: _Candidate, gradient: Tensor) -> None:
    plain: PlainGradient | None = this()
    if plain is not None:
        plain.judge(candidate, gradient)


def _say(why: str) -> None:
    warn_once(
        ("gradient", why),
        f"Autograd computes every gradient, in spite of backpack(gradient=...): {why}.",
        BackpackWarning,
    )
