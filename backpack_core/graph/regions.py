"""The insides of calls that the survey goes through node by node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
