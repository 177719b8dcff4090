"""Rules of layers that move entries around: reshapes, shuffles, patches, upsampling."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn import (
    ChannelShuffle,
    Flatten,
    Fold,
    Identity,
    PixelShuffle,
    PixelUnshuffle,
    Unflatten,
    Unfold,
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
)

from backpack_core.record.view import View
from backpack_layers.layout import require_axes
from backpack_layers.linear_map import LinearMapRule, over_columns
from backpack_products.derivatives import SecondOrderRule


class ReshapeRule(SecondOrderRule):
    """``Flatten``, ``Unflatten``, ``Identity``: the same entries in another shape.

    If one changes the length of axis 0, its call is opened: columns cross the operation instead.
    """

    module_types = (Flatten, Unflatten, Identity)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat.reshape(len(mat), *view.input_shape)


class PixelShuffleRule(SecondOrderRule):
    """Channels become pixels, or the reverse: a permutation, so transpose and inverse agree."""

    module_types = (PixelShuffle, PixelUnshuffle)
    hessian_is_zero = True
    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_axes(view, 4, "[N, C, H, W]")

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        module = view.module
        if isinstance(module, PixelUnshuffle):
            return F.pixel_shuffle(mat, module.downscale_factor)
        return F.pixel_unshuffle(mat, cast(PixelShuffle, module).upscale_factor)


class ChannelShuffleRule(SecondOrderRule):
    """Interleaves the channels of ``g`` groups."""

    module_types = (ChannelShuffle,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_axes(view, 3, "[N, C, *]")

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        groups = cast(ChannelShuffle, view.module).groups
        return rearrange(mat, "v n (c g) ... -> v n (g c) ...", g=groups)


class UnfoldRule(SecondOrderRule):
    """``Unfold`` takes patches, ``Fold`` adds them up: each is the transpose of the other."""

    module_types = (Unfold, Fold)
    hessian_is_zero = True
    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        if isinstance(view.module, Unfold):
            require_axes(view, 4, "[N, C, H, W]")
        else:
            require_axes(view, 3, "[N, C·K, L]")

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        module = cast("Fold | Unfold", view.module)
        settings = (module.kernel_size, module.dilation, module.padding, module.stride)
        if isinstance(module, Fold):
            return over_columns(lambda m: F.unfold(m, *settings), mat)
        size = (view.input_shape[-2], view.input_shape[-1])
        return over_columns(lambda m: F.fold(m, size, *settings), mat)


class UpsampleRule(LinearMapRule):
    """Interpolation in any mode: linear in the input."""

    module_types = (Upsample, UpsamplingNearest2d, UpsamplingBilinear2d)

    def apply(self, view: View, x: Tensor) -> Tensor:
        """Interpolate, as the module does."""
        module = cast(Upsample, view.module)
        return F.interpolate(
            x,
            module.size,
            module.scale_factor,
            module.mode,
            module.align_corners,
            recompute_scale_factor=module.recompute_scale_factor,
        )
