"""What lies between the numbers that ``backward()`` is called on and the extended losses."""

from __future__ import annotations

from collections.abc import Iterable

from backpack_core._torch import Node
from backpack_core.graph import nodes
from backpack_core.graph.paths import leads_to_parameters
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Edge, Site


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


def reached_past_losses(survey: Survey, roots: Iterable[Edge]) -> Site | None:
    """A module that a way from the roots to what is trained meets before any extended loss."""
    todo = list(roots)
    seen = set(todo)
    while todo:
        edge = todo.pop()
        site = survey.site_at(edge)
        if site is not None and site.call.rule.is_loss:
            continue
        if site is not None and not survey.goes_inside(site.call):
            if leads_to_parameters(survey, [(0, edge)]):
                return site
            continue
        behind = [site.below] if site else [e for _, e in edges_behind(edge.node)]
        todo += [e for e in behind if e not in seen]
        seen.update(behind)
    return None
