"""Walks from nodes to what lies behind them, and numbers nodes so that consumers come first.

Autograd has such an order, but does not tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from backpack_core._torch import Node
from backpack_core.record.call import calls_at

T = TypeVar("T")


def reached(starts: Iterable[T], further: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """The starts, and everything that they lead to, each once."""
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
    """All nodes that some nodes send gradients to, directly or not; ``None`` sends nothing."""
    first = [child for node in starts if node is not None for child in children_of(node)]
    return set(reached(first, children_of))


def children_of(node: Node) -> list[Node]:
    """The nodes that a node sends gradients to."""
    return [child for child, _ in node.next_functions if child is not None]


def ranks(*starts: Node) -> dict[Node, int]:
    """A number for every node behind some, smaller than those of all nodes it sends to.

    The nodes inside of calls are included: a rule may decline, and leave the work to them.
    """
    finished: list[Node] = []
    opened: set[Node] = set()
    path: list[Node] = []
    todo: list[Node | None] = [*reversed(starts)]
    while todo:  # depth first: the deepest nodes are finished first
        node = todo.pop()
        if node is None:  # everything behind the last one on the path is done
            finished.append(path.pop())
        elif node not in opened:
            opened.add(node)
            path.append(node)
            todo.append(None)
            further = children_of(node)
            for call in calls_at(node):
                further += [edge.node for edge in call.edges if edge is not None]
            todo += further[::-1]
    return {node: rank for rank, node in enumerate(reversed(finished))}
