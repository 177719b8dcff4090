"""The parameters that quantities are stored on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from backpack_core.errors import UnsupportedError
from backpack_core.record.call import Call


class Trained(NamedTuple):
    """A parameter that a call reads off.

    Attributes:
        name: What the module calls it.
        parameter: What gets the quantity.
        used: What the module used: that parameter, or what it computed from it.
        is_covered: Whether the rule covers it.
    """

    name: str
    parameter: Tensor
    used: Tensor
    is_covered: bool


def trained_in(call: Call) -> tuple[Trained, ...]:
    """The parameters that a call reads off."""
    stored, found = call.stored, []
    for name in stored.parameters:
        tensor, _ = stored.owned[name]
        if tensor.requires_grad:
            is_covered = call.rule.covers(call.module, name)
            for parameter in stored.computed.get(name, (tensor,)):
                found.append(Trained(name, parameter, tensor, is_covered))
    return tuple(found)


def complex_parameter(name: str) -> UnsupportedError:
    """The error for a trained parameter of complex numbers."""
    return UnsupportedError(
        f"The parameter {name} is complex, and quantities are defined for real parameters "
        "only: train its real and its imaginary part as two parameters, or freeze it."
    )
