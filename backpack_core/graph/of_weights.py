"""Tensors that are functions of parameters alone, or may be."""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from backpack_core._torch import Node
from backpack_core.graph import nodes
from backpack_core.graph.order import children_of
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Call, Edge


class OfWeights:
    """Says of nodes whether what they computed has no part in any sample."""

    def __init__(
        self, survey: Survey, tables: Iterable[Node] = (), *, or_constants: bool = False
    ) -> None:
        """Begin; of tables it is known.

        Args:
            survey: What is known about the graph.
            tables: Nodes that have no part in any sample.
            or_constants: Say so, too, where an operand that needs no gradient may have one: it
                is a frozen weight as well as data.
        """
        self._survey = survey
        self._or_constants = or_constants
        self._known = dict.fromkeys(tables, True)

    def __contains__(self, node: Node) -> bool:
        """Whether a tensor is known to be a function of parameters alone."""
        known = self._known.get(node)
        if known is not None:
            return known
        todo = [node]
        while todo:
            this = todo[-1]
            if this in self._known:
                todo.pop()
                continue
            children, calls = children_of(this), self._calls_at(this)
            inner = [child for child in children if not nodes.is_leaf(child)]
            if calls:
                inner = [e.node for call in calls for e in call.edges if e is not None]
                children = [*inner, *[n for call in calls for n in leaves_given_to(call)]]
            is_known = bool(calls) or self._or_constants or nodes.is_of_its_operands(this)
            is_known = is_known and all(map(_knows_its_inputs, calls))
            is_known = is_known and all(map(self._is_weight, {*children} - {*inner}))
            if not is_known or any(self._known.get(child) is False for child in inner):
                self._known[this] = False
            elif all(child in self._known for child in inner):
                self._known[this] = bool(children)
            else:
                todo += [child for child in inner if child not in self._known]
        return self._known[node]

    def _is_weight(self, leaf: Node) -> bool:
        tensor = leaf.variable  # type: ignore[attr-defined]
        known = self._survey.uses.keys() | self._survey.freed.keys()
        return isinstance(tensor, Parameter) or id(tensor) in known

    def _calls_at(self, node: Node) -> set[Call]:
        """Calls that are stepped over at a node."""
        sites = (self._survey.site_at(Edge(node, nr)) for nr in range(len(node._input_metadata)))
        calls = {site.call for site in sites if site is not None}
        return {call for call in calls if not self._survey.goes_inside(call)}


def _knows_its_inputs(call: Call) -> bool:
    """Whether all that a call received has an edge, or is a parameter."""
    given = zip(call.stored.inputs, call.edges, strict=True)
    return all(edge is not None or isinstance(tensor, Parameter) for tensor, edge in given)


def leaves_given_to(call: Call) -> list[Node]:
    """Where the gradients of parameters go that a call received as arguments."""
    given = zip(call.stored.inputs, call.edges, strict=True)
    leaves = [
        t for t, edge in given if edge is None and isinstance(t, Parameter) and t.requires_grad
    ]
    return [get_gradient_edge(t).node for t in leaves]
