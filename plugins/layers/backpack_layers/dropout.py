"""Rules of dropout. The random mask is taken from autograd's node, or follows from the output.

The output does not show the mask where a whole unit of the input is zero, because kept and dropped
units are equal there. The rule then raises an error, and columns go through the autograd graph,
which holds the mask. This check reads values, which waits for an accelerator. So the output is used
only if the node may not be read.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
)
from torch.nn.modules.dropout import _DropoutNd

from backpack_core.contract.rules import ModuleType
from backpack_core.errors import OverwrittenInputError
from backpack_core.record.view import View
from backpack_products.elementwise import ElementwiseRule
from backpack_products.some_samples import saved_in
from backpack_products.values import any_of

# Negative saturation of SELU, to which AlphaDropout sets what it drops.
SATURATION = 1.6732632423543772 * 1.0507009873554805
# Torch's operations for dropout, and the saved tensor of each: a scaled mask, or a mask.
_FACTORS = {"MulBackward0": "other", "NativeDropoutBackward0": "result1"}


class DropoutRule(ElementwiseRule):
    """Entries (``Dropout``) or whole channels set to zero, and the others scaled by ``1/(1-p)``."""

    module_types: ClassVar[tuple[ModuleType, ...]] = (Dropout, Dropout1d, Dropout2d, Dropout3d)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        """The scale where an entry was kept."""
        p = _probability(view)
        if p == 0.0:
            return torch.ones_like(view.output)
        if p == 1.0:
            return torch.zeros_like(view.output)
        return view.once("slope", lambda: self._slope(view, p))

    def _slope(self, view: View, p: float) -> Tensor:
        saved = self._saved(view)
        if saved is None:
            return self._mask(view, p) * self._scale(p)
        slope = saved * self._scale(p) if saved.dtype == torch.bool else saved
        return slope.to(view.dtype).expand(view.output_shape)

    def _saved(self, view: View) -> Tensor | None:
        """The mask, or the scaled mask, by which the module has multiplied."""
        return _factor(view, view.node)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat if _probability(view) == 0.0 else super()._jac_t_mat_prod(view, mat)

    def _scale(self, p: float) -> float:
        return 1 / (1 - p)

    def _mask(self, view: View, p: float) -> Tensor:
        x, axes = view.input, _unit_axes(view)
        _require(view, _any(x != 0, axes))
        return _any(view.output != 0, axes).to(x.dtype).expand_as(x)


class AlphaDropoutRule(DropoutRule):
    """Entries or channels set to the saturation of ``SELU``; an affine map restores two moments."""

    module_types = (AlphaDropout, FeatureAlphaDropout)

    def _saved(self, view: View) -> Tensor | None:
        """A shift is added after the product."""
        return None if view.node is None else _factor(view, view.node.next_functions[0][0])

    def _scale(self, p: float) -> float:
        return 1 / math.sqrt((SATURATION**2 * p + 1) * (1 - p))

    def _mask(self, view: View, p: float) -> Tensor:
        x, y, axes = view.input, view.output, _unit_axes(view)
        scale = self._scale(p)
        shift = scale * SATURATION * p
        if_kept, if_dropped = scale * x + shift, shift - scale * SATURATION
        # Kept and dropped values differ by far more than rounding.
        apart = (if_kept - if_dropped).abs() > 100 * torch.finfo(x.dtype).eps
        _require(view, _any(apart, axes))
        kept = apart & ((y - if_kept).abs() < (y - if_dropped).abs())
        return _any(kept, axes).to(x.dtype).expand_as(x)


def _factor(view: View, node: Node | None) -> Tensor | None:
    """The factor by which a node multiplied its input, if the node may be read."""
    name = "" if node is None else _FACTORS.get(node.name(), "")
    return saved_in(view, name, node) if name else None


def _probability(view: View) -> float:
    module = cast(_DropoutNd, view.module)
    return module.p if view.training else 0.0


def _unit_axes(view: View) -> tuple[int, ...]:
    """The axes that share one entry of the mask."""
    if isinstance(view.module, (Dropout, AlphaDropout)):
        return ()
    dims = len(view.input_shape)
    # These two take an input without a batch axis, for a single sample.
    unbatched = {Dropout1d: 2, Dropout3d: 4}
    no_batch = any(isinstance(view.module, t) and dims == d for t, d in unbatched.items())
    return tuple(range(1 if no_batch else 2, dims))


def _any(flags: Tensor, axes: tuple[int, ...]) -> Tensor:
    return flags.any(axes, keepdim=True) if axes else flags


def _require(view: View, visible: Tensor) -> None:
    if any_of(~visible):
        raise OverwrittenInputError(
            f"{view.path} drew a random mask that is not stored. Its output does not show the mask "
            "where the input equals a dropped entry. Call eval() on the module, or leave out "
            "quantities that need a second derivative behind it."
        )
