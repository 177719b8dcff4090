"""The insides of calls that the survey goes through node by node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.record.call import Call, Edge


class Region(NamedTuple):
    """The inside of a call that has no rule for propagation, as it is walked through."""

    call: Call
    parent: Region | None


def calls_around(region: Region | None) -> Iterator[Call]:
    """The calls that a region lies in, innermost first."""
    while region is not None:
        yield region.call
        region = region.parent


def leave(edge: Edge, region: Region | None) -> Region | None:
    """The enclosing call at an edge: the parent, where the inputs of the call begin."""
    while region and any(e and e[:2] == edge[:2] for e in region.call.edges):  # from anywhere
        region = region.parent
    return region


def given_to(call: Call) -> dict[tuple[Node, int], Tensor]:
    """Parameters of a call that are results of a computation, by the output of a node.

    They may be so under ``functional_call``: then they get the quantity, as a leaf would.
    """
    stored = call.stored
    used = (stored.owned[name][0] for name in stored.parameters)
    return {(node, t.output_nr): t for t in used if (node := t.grad_fn) is not None}
