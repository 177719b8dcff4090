"""Ways through a graph: from what ``backward()`` is called on, inside of calls, to parameters."""

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
        if node is None or leads_to_parameters(survey, node):
            return error
    return None


def nonlinear(survey: Survey) -> list[Node]:
    """Nodes between calls, with parameters behind them, that are not known to be linear."""
    between = dict.fromkeys(node for node, _ in survey.seen)
    return [n for n in between if not nodes.is_linear(n) and leads_to_parameters(survey, n)]


def leads_to_parameters(survey: Survey, start: Node) -> bool:
    """Whether any trained parameter lies behind a node; calls may have been released since."""
    seen: set[Edge] = set()
    todo = [edge for _, edge in edges_behind(start)]
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


def nonlinear_above(survey: Survey, roots: Iterable[Edge]) -> Node | None:
    """An operation that is applied to an extended loss and is not known to be linear in it.

    Args:
        survey: What is known about the graph.
        roots: What ``backward()`` is called on.
    """
    consumers: dict[Edge, list[Edge]] = {}
    losses: list[Edge] = []
    todo = list(roots)
    consumers.update((edge, []) for edge in todo)
    while todo:
        edge = todo.pop()
        site = survey.site_at(edge)
        if site is not None and site.call.rule.is_loss:
            losses.append(edge)
            continue
        if site is not None and not survey.goes_inside(site.call):
            continue  # a module that is no loss: what is behind is the net
        through = [site.below] if site else [e for _, e in edges_behind(edge.node)]
        for behind in through:
            if behind not in consumers:
                consumers[behind] = []
                todo.append(behind)
            consumers[behind].append(edge)
    reached, todo = set(losses), losses
    while todo:
        for edge in consumers[todo.pop()]:
            if edge in reached:
                continue
            reached.add(edge)
            todo.append(edge)
            if survey.site_at(edge) is None and not nodes.is_linear(edge.node):
                return edge.node
    return None


def begins_at_losses(survey: Survey, roots: Iterable[Edge]) -> bool:
    """Whether every way from the roots to a module leads through an extended loss."""
    todo = list(roots)
    seen = set(todo)
    while todo:
        edge = todo.pop()
        site = survey.site_at(edge)
        if site is not None and site.call.rule.is_loss:
            continue
        if site is not None and not survey.goes_inside(site.call):
            return False
        behind = [site.below] if site else [e for _, e in edges_behind(edge.node)]
        todo += [e for e in behind if e not in seen]
        seen.update(behind)
    return True
