"""Walks over autograd graphs, and topological orders of their nodes.

"Behind" is the direction of the backward pass: from a node to the nodes it sends gradients to.
Autograd has its own topological order, but does not tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from backpack_core._torch import Node
from backpack_core.record.call import SITES, Call

T = TypeVar("T")


def reached(starts: Iterable[T], further: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields the starts and everything reachable from them, each once, in no order."""
    todo = list(dict.fromkeys(starts))
    seen = set(todo)
    while todo:
        item = todo.pop()
        yield item
        for other in further(item):
            if other not in seen:
                seen.add(other)
                todo.append(other)


def behind(starts: Iterable[Node | None]) -> set[Node]:
    """All nodes that receive gradients from the starts, directly or through other nodes."""
    seen: set[Node] = set()
    todo = [node for node in starts if node is not None]
    while todo:
        for child, _ in todo.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return seen


def children_of(node: Node) -> list[Node]:
    """The nodes that a node sends gradients to."""
    return [child for child, _ in node.next_functions if child is not None]


def calls_at(node: Node) -> list[Call]:
    """The calls that are recorded on the outputs of a node."""
    metadata: Any = node.metadata
    return [call for call, _ in metadata.get(SITES, {}).values()]


def consumers_first(starts: Iterable[T], further: Callable[[T], Sequence[T]]) -> list[T]:
    """The starts and everything reachable from them, in topological order: consumers first."""
    finished: list[T] = []
    opened: set[T] = set()
    path: list[T] = []
    todo: list[T | None] = [*reversed([*starts])]
    while todo:  # depth first: the deepest nodes are finished first
        item = todo.pop()
        if item is None:  # everything behind the last item of the path is finished
            finished.append(path.pop())
        elif item not in opened:
            opened.add(item)
            path.append(item)
            todo.append(None)
            todo += further(item)[::-1]
    return finished[::-1]


def ranks(*starts: Node) -> dict[Node, int]:
    """A rank for every node behind the starts, smaller than those of all nodes it sends to.

    The nodes inside of calls are included, since a call may be crossed by its nodes after all.
    """

    def further(node: Node) -> list[Node]:
        edges = [edge for call in calls_at(node) for edge in call.edges if edge is not None]
        return [*children_of(node), *[edge.node for edge in edges]]

    return {node: rank for rank, node in enumerate(consumers_first(starts, further))}
