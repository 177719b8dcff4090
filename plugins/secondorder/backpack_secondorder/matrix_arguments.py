"""Checks of the arguments of curvature matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from backpack_core.errors import ShapeError, UsageError
from backpack_products.fingerprint import agreed
from backpack_products.values import any_of

if TYPE_CHECKING:
    from backpack_secondorder.matrix import CurvatureMatrix, Number, ParameterOrder


def check_same(first: CurvatureMatrix, second: Any) -> None:
    """Check that two matrices have the same form and belong to the same parameter.

    Raises:
        UsageError: Their forms differ, or a loaded one was computed by other plugins.
        ShapeError: Their parameters differ in shape, or they number entries differently.
    """
    if type(first) is not type(second):
        raise UsageError(
            f"{type(first).__name__} can only be added to its own kind. Got "
            f"{type(second).__name__}."
        )
    if not first.order.equals(second.order):
        raise ShapeError(
            "Matrices can be added if they belong to one parameter. Got matrices for the shapes "
            f"{list(first.order.shape)} and {list(second.order.shape)}"
            f"{', in another order' * (first.order.shape == second.order.shape)}."
        )
    if first.order.saved or second.order.saved:  # others were computed in this process
        results = {"This matrix": first.order.plugins, "the other one": second.order.plugins}
        agreed(results, is_one_quantity=False)


def check_finite(name: str, tensor: Tensor, order: ParameterOrder) -> None:
    """Check that all numbers of a matrix are finite.

    Args:
        name: The name of the tensor in the matrix, for the message.
        tensor: The tensor.
        order: The order, which names the parameter.

    Raises:
        UsageError: One is infinite, or not a number.
    """
    if any_of(~tensor.isfinite()):
        raise UsageError(
            f"The {name} of {order} is not finite: gradients overflowed, or the net has a number "
            "that is inf or nan. Look at the loss and at the outputs of that module, or leave "
            "this batch out."
        )


def check_scalar(scalar: Any) -> Number:
    """Check that a factor is a number and not negative, and return it.

    Raises:
        UsageError: The factor is not a number, or is negative.
    """
    kind = "A curvature matrix can only be multiplied by a number; for vectors, use @."
    return _number(scalar, kind, "The factor of a curvature matrix must not be negative.")


def check_damping(damping: Any) -> Number:
    """Check that the damping is a single number and not negative, and return it.

    Raises:
        UsageError: The damping is negative, or not a number.
    """
    kind = "The damping must be one number; for several, damp each block."
    return _number(damping, kind, "The damping must not be negative.")


def _number(value: Any, kind: str, sign: str) -> Number:
    """The value of a number, or of a tensor with one number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        if any_of(~(value >= 0)):
            raise UsageError(f"{sign} Got {value!r}.")
        return value.reshape(())
    try:
        number = float(value) if not isinstance(value, (Tensor, str)) else None
    except (TypeError, ValueError):
        number = None
    if number is None or not number >= 0:
        raise UsageError(f"{kind if number is None else sign} Got {value!r}.")
    return number
