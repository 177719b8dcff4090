"""The parameters that results are stored on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from backpack_core.errors import UnsupportedError
from backpack_core.graph.nodes import is_leaf
from backpack_core.graph.order import ranks
from backpack_core.record.call import Call, edge_of


class Trained(NamedTuple):
    """A parameter that is read at a call.

    Attributes:
        name: Its name in the module.
        parameter: What the result is stored on.
        used: The tensor that the module used: the parameter, or what was computed from it.
    """

    name: str
    parameter: Tensor
    used: Tensor


def trained_in(call: Call) -> tuple[tuple[Trained, ...], tuple[Trained, ...]]:
    """The parameters that a call reads off, and those that its rule does not cover."""
    stored, covers = call.stored, call.rule.covers
    covered: list[Trained] = []
    others: list[Trained] = []
    for name in stored.parameters:
        tensor, _ = stored.owned[name]
        if tensor.requires_grad and name not in stored.frozen:
            found = covered if covers(call.module, name) else others
            for parameter in stored.computed.get(name, (tensor,)):
                # Much faster than Trained(...).
                found.append(tuple.__new__(Trained, (name, parameter, tensor)))
    return tuple(covered), tuple(others)


def complex_parameter(name: str) -> UnsupportedError:
    """The error for a trained parameter of complex numbers."""
    return UnsupportedError(
        f"The parameter {name} is complex, and quantities are defined for real parameters "
        "only: train its real and its imaginary part as two parameters, or freeze it."
    )


def leaves_behind(tensor: Tensor) -> tuple[Tensor, ...]:
    """The leaves with a gradient that a tensor was computed from."""
    edge = edge_of(tensor)
    if edge is None:
        return (tensor,) if tensor.requires_grad else ()
    return tuple(n.variable for n in ranks(edge.node) if is_leaf(n))  # type: ignore[attr-defined]
