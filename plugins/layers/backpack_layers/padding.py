"""Rules of padding layers: zeros, a constant, reflection, replication, wrapping around."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn import (
    CircularPad1d,
    CircularPad2d,
    CircularPad3d,
    ConstantPad1d,
    ConstantPad2d,
    ConstantPad3d,
    ReflectionPad1d,
    ReflectionPad2d,
    ReflectionPad3d,
    ReplicationPad1d,
    ReplicationPad2d,
    ReplicationPad3d,
    ZeroPad1d,
    ZeroPad2d,
    ZeroPad3d,
)

from backpack_core.record.view import View
from backpack_layers.layout import require_axes
from backpack_layers.linear_map import LinearMapRule
from backpack_products.derivatives import SecondOrderRule

REFLECTIONS = (ReflectionPad1d, ReflectionPad2d, ReflectionPad3d)
REPLICATIONS = (ReplicationPad1d, ReplicationPad2d, ReplicationPad3d)


class ConstantPadRule(SecondOrderRule):
    """Adds entries that do not depend on the input; negative padding cuts entries off."""

    module_types = (ConstantPad1d, ConstantPad2d, ConstantPad3d, ZeroPad1d, ZeroPad2d, ZeroPad3d)
    hessian_is_zero = True
    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse to pad the batch axis."""
        _check_batch(view)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        # What was added is cut off, what was cut off becomes zero.
        return F.pad(mat, [-p for p in _padding(view)])


class CopyPadRule(LinearMapRule):
    """Adds copies of entries of the input."""

    module_types = (
        *REFLECTIONS,
        *REPLICATIONS,
        CircularPad1d,
        CircularPad2d,
        CircularPad3d,
    )

    def check(self, view: View) -> None:
        """Refuse to pad the batch axis."""
        _check_batch(view)

    def apply(self, view: View, x: Tensor) -> Tensor:
        """Pad, as the module does."""
        if isinstance(view.module, REFLECTIONS):
            return F.pad(x, _padding(view), mode="reflect")
        if isinstance(view.module, REPLICATIONS):
            return F.pad(x, _padding(view), mode="replicate")
        return F.pad(x, _padding(view), mode="circular")


def _padding(view: View) -> list[int]:
    return list(cast(ConstantPad3d, view.module).padding)


def _check_batch(view: View) -> None:
    axes = len(_padding(view)) // 2
    require_axes(view, axes + 1, f"with a batch axis in front of the {axes} that are padded")
