"""What arguments of curvature matrices have to be. Imports torch, and ``matrix`` for its types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from backpack_core.errors import ShapeError, UsageError
from backpack_products.fingerprint import agreed
from backpack_products.values import any_of

if TYPE_CHECKING:
    from backpack_secondorder.matrix import CurvatureMatrix, Number, ParameterOrder


def check_same(first: CurvatureMatrix, second: Any) -> None:
    """Raise unless both are matrices of one form for one parameter.

    Raises:
        UsageError: They are of two kinds, or a saved one was computed by other plugins.
        ShapeError: They belong to parameters of two shapes, or number entries differently.
    """
    if type(first) is not type(second):
        raise UsageError(
            f"{type(first).__name__} can be added to its own kind. Got {type(second).__name__}."
        )
    if not first.order.equals(second.order):
        raise ShapeError(
            "Matrices are added for one parameter. Got some of a parameter of shape "
            f"{list(first.order.shape)} and of one of shape {list(second.order.shape)}"
            f"{', in another order' * (first.order.shape == second.order.shape)}."
        )
    if first.order.saved or second.order.saved:  # others are of this process
        results = {"This matrix": first.order.plugins, "the other one": second.order.plugins}
        agreed(results, is_one_quantity=False)


def check_finite(name: str, tensor: Tensor, order: ParameterOrder) -> None:
    """Raise unless all numbers of a matrix are finite.

    Args:
        name: What the tensor is of the matrix.
        tensor: Numbers of it.
        order: Whose they are.

    Raises:
        UsageError: One is infinite, or not a number.
    """
    if any_of(~tensor.isfinite()):
        raise UsageError(
            f"The {name} of {order} is not finite: gradients have overflown, or a number of the "
            "net is inf or nan. Look at the loss and at the outputs of that module, or leave this "
            "batch out."
        )


def check_scalar(scalar: Any) -> Number:
    """Check that the factor is a number that is not negative, and return it.

    Raises:
        UsageError: It is not a number, or is negative.
    """
    kind = "A curvature matrix is multiplied by a number; for vectors, use @."
    return _number(scalar, kind, "Curvature is scaled by numbers that are not negative.")


def check_damping(damping: Any) -> Number:
    """Check that the damping is one number that is not negative, and return it.

    Raises:
        UsageError: It is negative, or no number.
    """
    kind = "The damping is one number; of several, go by blocks."
    return _number(damping, kind, "The damping must not be negative.")


def _number(value: Any, kind: str, sign: str) -> Number:
    """A number, or a tensor that is one."""
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
