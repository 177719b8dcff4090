"""Ways through a graph: between the inputs and outputs of calls, and from node to call."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.graph import nodes
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Edge, Site


def inside(site: Site) -> set[Node]:
    """The nodes between an output of a call and its inputs."""
    ends = {(edge.node, edge.output_nr) for edge in site.call.edges if edge is not None}
    found, todo = {site.edge.node}, [site.edge.node]
    while todo:
        for _, edge in edges_behind(todo.pop()):
            if (edge.node, edge.output_nr) not in ends and edge.node not in found:
                found.add(edge.node)
                todo.append(edge.node)
    return found


def sources(survey: Survey, node: Node) -> list[str]:
    """The calls whose outputs an operation works on, through other operations: their paths."""
    found: dict[str, None] = {}
    todo, seen = [node], {node}
    while todo:
        for _, edge in edges_behind(todo.pop()):
            site = survey.site_at(edge)
            if site is not None:
                found[site.call.path] = None
            elif edge.node not in seen:
                seen.add(edge.node)
                todo.append(edge.node)
    return list(found)


def fault_in(survey: Survey) -> BackpackError | None:
    """The first fault that concerns an extended module: its own, or of a node after it."""
    for error, node in survey.faults:
        if node is None or leads_to_parameters(survey, edges_behind(node)):
            return error
    return None


def nonlinear(survey: Survey) -> list[Node]:
    """Nodes between calls, with parameters behind them, that are not known to be linear."""
    between = dict.fromkeys(node for node, _ in survey.seen)
    return [
        n
        for n in between
        if not nodes.is_linear(n) and leads_to_parameters(survey, edges_behind(n))
    ]


def leads_to_parameters(survey: Survey, edges: Iterable[tuple[int, Edge]]) -> bool:
    """Whether any trained parameter lies behind some edges; calls may have been released since."""
    seen: set[Edge] = set()
    todo = [edge for _, edge in edges]
    while todo:
        edge = todo.pop()
        if edge in seen:
            continue
        seen.add(edge)
        site = survey.site_at(edge)
        if isinstance(getattr(edge.node, "variable", None), Parameter):
            return True
        if site is None:
            todo += [behind for _, behind in edges_behind(edge.node)]
        elif survey.trained.get(site.call):
            return True
        elif survey.goes_inside(site.call):
            todo.append(site.below)
        else:
            todo += [behind for behind in site.call.edges if behind is not None]
    return False
