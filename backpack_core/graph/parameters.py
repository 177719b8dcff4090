"""The parameters that results are stored on: those of a call, or the leaves of computed ones."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from backpack_core.errors import UnsupportedError
from backpack_core.record.call import Call


class Trained(NamedTuple):
    """A trained parameter that a call uses.

    Attributes:
        name: Its name in the module.
        parameter: The leaf that the result is stored on.
        used: The tensor that the module used: the parameter, or one that was computed from it.
    """

    name: str
    parameter: Tensor
    used: Tensor


def trained_in(call: Call) -> tuple[tuple[Trained, ...], tuple[Trained, ...]]:
    """The trained parameters of a call that its rule covers, and those that it does not."""
    stored, covers = call.stored, call.rule.covers
    covered: list[Trained] = []
    others: list[Trained] = []
    for name in stored.parameters:
        tensor, _ = stored.owned[name]
        if tensor.requires_grad and name not in stored.frozen:
            group = covered if covers(call.module, name) else others
            for parameter in stored.computed.get(name, (tensor,)):
                # Much faster than Trained(...).
                group.append(tuple.__new__(Trained, (name, parameter, tensor)))
    return tuple(covered), tuple(others)


def complex_parameter(name: str) -> UnsupportedError:
    """The error for a trained parameter with complex values."""
    return UnsupportedError(
        f"The parameter {name} is complex, and quantities are defined for real parameters "
        "only: train its real and its imaginary part as two parameters, or freeze it."
    )
