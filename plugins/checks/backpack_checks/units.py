"""Rounding units of what was computed: the precision that comparisons can ask for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backpack_core._torch import Node
from backpack_operations._torch import metadata_of
from backpack_products.values import rounding_unit


def coarsest_of(tensors: Iterable[Any]) -> float:
    """The coarsest rounding unit of some tensors, or of metadata of tensors."""
    return max((rounding_unit(t) for t in tensors if t.dtype.is_floating_point), default=0.0)


def coarsest_at(nodes: Iterable[Node]) -> float:
    """The coarsest rounding unit of what nodes have computed."""
    pairs = ((node, nr) for node in nodes for nr in range(len(node._input_metadata)))
    return coarsest_of(metadata_of(node, nr) for node, nr in pairs)
