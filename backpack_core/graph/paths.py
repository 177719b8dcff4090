"""Ways through a graph: between the inputs and outputs of calls, and from node to call."""

from __future__ import annotations

from backpack_core._torch import Node
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Site


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
