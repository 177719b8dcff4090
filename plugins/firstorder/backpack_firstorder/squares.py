"""The base of extensions of squared gradients, and a check of the range of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.errors import RangeWarning, warn_once
from backpack_products import FirstOrderExtension
from backpack_products.values import any_of


class SquaresExtension(FirstOrderExtension):
    """An extension with values quadratic in the gradients; stored at least in single precision."""

    def dtype_for(self, parameter: Tensor) -> torch.dtype:
        """Single precision for parameters in half precision: their squares would overflow."""
        return torch.promote_types(parameter.dtype, torch.float32)


def warn_of_range(norm: Tensor, squares: Tensor, key: object, message: str) -> None:
    """Warn once if a square is infinite or has lost digits, although its norm is exact.

    Args:
        norm: Norms, exact for any size.
        squares: Their squares.
        key: Each key warns once.
        message: The text.
    """
    lost = (norm > 0) & (squares < torch.finfo(squares.dtype).tiny)
    if any_of(lost | (norm.isfinite() & ~squares.isfinite())):
        warn_once(key, message, RangeWarning)
