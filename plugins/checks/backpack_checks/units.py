"""Rounding units of what was computed: the precision that comparisons can ask for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backpack_core._torch import Node
from backpack_operations._torch import metadata_of
from backpack_operations.nodes import operation_of
from backpack_products.values import rounding_unit

# Formulas of torch that are coarser than double precision, as if with such a rounding unit. For
# matrices of a norm below 0.05, the coefficients of the exponential have few digits.
_FORMULAS = {"LinalgMatrixExp": 1e-12}


def coarsest_of(tensors: Iterable[Any]) -> float:
    """The coarsest rounding unit of some tensors, or of metadata of tensors."""
    return max((rounding_unit(t) for t in tensors if t.dtype.is_floating_point), default=0.0)


def coarsest_at(nodes: Iterable[Node]) -> float:
    """The coarsest rounding unit of what nodes have computed, or the precision of a formula."""
    nodes = [*nodes]
    pairs = ((node, nr) for node in nodes for nr in range(len(node._input_metadata)))
    formulas = (_FORMULAS.get(operation_of(node), 0.0) for node in nodes)
    return max(coarsest_of(metadata_of(node, nr) for node, nr in pairs), *formulas, 0.0)
