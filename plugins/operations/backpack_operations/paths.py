"""Questions about paths in a graph: between losses and calls, inside calls, to parameters.

Checks and messages ask them. Each walks only as far as its answer needs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.record.call import Call, Edge, Site
from backpack_operations import nodes
from backpack_operations.order import behind, consumers_first, reached
from backpack_operations.survey import GraphSurvey, edges_behind


def inside(site: Site) -> dict[Node, None]:
    """The nodes between an output of a call and its inputs, in the order of a walk."""
    ends = {(edge.node, edge.output_nr) for edge in site.call.edges if edge is not None}

    def further(node: Node) -> list[Node]:
        edges = (edge for _, edge in edges_behind(node))
        return [edge.node for edge in edges if (edge.node, edge.output_nr) not in ends]

    return dict.fromkeys(reached([site.edge.node], further))


def fault_in(survey: GraphSurvey) -> BackpackError | None:
    """The first fault with trained parameters behind it; ``None`` if there is none."""
    for error, node in survey.faults:
        if node is None or leads_to_parameters(survey, _sent_on(node)):
            return error
    return None


def nonlinear(survey: GraphSurvey) -> list[Node]:
    """The operations between calls that are not known to be linear and lead to parameters."""
    between = dict.fromkeys(node for node, _ in survey.between)
    return [
        n for n in between if not nodes.is_linear(n) and leads_to_parameters(survey, _sent_on(n))
    ]


def leads_to_parameters(survey: GraphSurvey, edges: Iterable[Edge]) -> bool:
    """Whether a trained parameter lies behind some edges, also after calls were freed."""

    def is_trained(edge: Edge) -> bool:
        site = survey.site_at(edge)
        has_some = site is not None and bool(survey.trained.get(site.call))
        return has_some or isinstance(getattr(edge.node, "variable", None), Parameter)

    return any(map(is_trained, reached(edges, survey.further)))


def _sent_on(node: Node) -> list[Edge]:
    return [edge for _, edge in edges_behind(node)]


def _above(survey: GraphSurvey, roots: Iterable[Edge]) -> dict[Edge, list[Edge]]:
    """The graph between the roots and the first losses or modules with a rule: edges by edge.

    Losses and modules with a rule have no edges behind them. Terms in ``beside`` are left out.
    """

    def further(edge: Edge) -> list[Edge]:
        site = survey.site_at(edge)
        is_end = site is not None and (site.call.rule.is_loss or site.call not in survey.opened)
        if is_end:
            return []
        return [other for other in survey.further(edge) if other[:2] not in survey.beside]

    return {edge: further(edge) for edge in reached(roots, further)}


def nonlinear_above(survey: GraphSurvey, roots: Iterable[Edge]) -> Node | None:
    """An operation above an extended loss that is not known to be linear in it.

    Args:
        survey: What is known about the graph.
        roots: What ``backward()`` is called on.
    """
    above, leading = _above(survey, roots), set[Edge]()  # leading: edges that lead to a loss
    for edge in reversed(consumers_first(roots, above.__getitem__)):
        site = survey.site_at(edge)
        if _is_loss(site) or not leading.isdisjoint(above[edge]):
            leading.add(edge)
            if site is None and not nodes.is_linear(edge.node):
                return edge.node
    return None


def reached_past_losses(survey: GraphSurvey, roots: Iterable[Edge]) -> Site | None:
    """A trained module that the roots depend on other than by a loss; ``None`` if there is none."""
    for edge, further in _above(survey, roots).items():
        site = survey.site_at(edge)
        if site is None or further or _is_loss(site) or site.call in survey.opened:
            continue
        if leads_to_parameters(survey, [edge]):
            return site
    return None


def losses_without_rule(survey: GraphSurvey, roots: Iterable[Edge]) -> set[Call]:
    """Calls without a rule that compute a loss: no call with a rule uses their result."""
    if not any(call.rule.transparent for call, _ in survey.sites):
        return set()
    sites = map(survey.site_at, _above(survey, roots) if survey.opened else ())
    calls = {site.call for site in sites if site is not None and site.call.rule.transparent}
    losses = {call for call in calls if any(call.edges[:1])}
    is_all = all(call in losses or call.rule.is_loss for call, _ in survey.sites)
    return set() if is_all else losses


def is_factor(survey: GraphSurvey, parameter: Tensor) -> bool:
    """Whether what has no samples any more is multiplied or divided by a function of a parameter.

    Args:
        survey: What is known about the graph.
        parameter: A parameter that functions use.
    """
    of_modules = {site.edge.node for site in survey.sites.values()}
    for product in {node for node, _ in survey.between}:
        if nodes.operation_of(product) not in nodes.FACTORS.keys() | nodes.QUOTIENTS:
            continue
        if isinstance(has := survey.alignment.entries_at(Edge(product, 0)), Tensor) or has:
            continue  # within the net
        factors = [{edge.node, *behind([edge.node])} for edge in _sent_on(product)]
        uses = [any(getattr(n, "variable", None) is parameter for n in each) for each in factors]
        others = (each for each, is_used in zip(factors, uses, strict=True) if not is_used)
        if any(uses) and any(each & of_modules for each in others):
            return True
    return False


def _is_loss(site: Site | None) -> bool:
    return site is not None and site.call.rule.is_loss
