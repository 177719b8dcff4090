"""Rules of pooling by average and by power mean; ``max_pooling`` holds those by maximum."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    LPPool1d,
    LPPool2d,
    LPPool3d,
)

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.layout import require_channels
from backpack_layers.linear_map import LinearMapRule, over_columns, transposed
from backpack_products.derivatives import SecondOrderRule


class AvgPoolRule(LinearMapRule):
    """The mean of every window. In one dimension, a window of height one."""

    module_types = (AvgPool1d, AvgPool2d, AvgPool3d)

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_channels(view)

    def apply(self, view: View, x: Tensor) -> Tensor:
        """Average pooling."""
        pool = F.avg_pool3d if x.dim() == 5 else F.avg_pool2d
        return _flat(view, pool(_tall(view, x), *self._settings(view)))

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        aten = torch.ops.aten
        backward = aten.avg_pool3d_backward if mat.dim() == 6 else aten.avg_pool2d_backward

        def transpose(m: Tensor) -> Tensor:
            product = backward(_tall(view, m), _shape_only(view, m), *self._settings(view))
            return _flat(view, product)

        return over_columns(transpose, mat)

    def _settings(self, view: View) -> tuple[Any, ...]:
        pool = cast(AvgPool2d, view.module)
        windows = (pool.kernel_size, pool.stride, pool.padding)
        flags = (pool.ceil_mode, pool.count_include_pad)
        dims = len(view.input_shape) - 2
        if dims == 1:
            (k,), (s,), (p,) = (cast("tuple[int]", window) for window in windows)
            return ((1, k), (1, s), (0, p), *flags, None)
        lists = [[w] * dims if isinstance(w, int) else list(w) for w in windows]
        return (*lists, *flags, pool.divisor_override)


class AdaptiveAvgPoolRule(LinearMapRule):
    """The mean of windows whose sizes follow from the output size."""

    module_types = (AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d)

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_channels(view)

    def apply(self, view: View, x: Tensor) -> Tensor:
        """Average pooling to the size of the output."""
        dims = len(view.output_shape) - 2
        pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
        product: Tensor = pool(x, view.output_shape[2:])
        return product

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        if view.output_shape[2:].numel() == 1:
            pixels = view.input_shape[2:].numel()
            return (mat / pixels).expand(len(mat), *view.input_shape)
        aten = torch.ops.aten
        backward = (
            aten._adaptive_avg_pool3d_backward
            if mat.dim() == 6
            else aten._adaptive_avg_pool2d_backward
        )
        return over_columns(
            lambda m: _flat(view, backward(_tall(view, m), _shape_only(view, m))), mat
        )


class LPPoolRule(SecondOrderRule):
    """The power mean ``(k · avg(xᵖ))^(1/p)`` of every window of size ``k``.

    Windows whose sum is zero get a gradient of zero, as torch documents.
    """

    module_types = (LPPool1d, LPPool2d, LPPool3d)

    def check(self, view: View) -> None:
        """Refuse the maximum norm, and an input without a batch axis."""
        require_channels(view)
        norm = cast(LPPool2d, view.module).norm_type
        if abs(float(norm)) == float("inf"):
            raise UnsupportedError(
                f"{view.path} has norm_type {norm}: use MaxPool of the absolute value instead."
            )

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        p, u = _power(view), self._sums(view)
        return view.input ** (p - 1) * self._transposed_sum(view, mat * _power_slope(u, p))

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        p, x, u = _power(view), view.input, self._sums(view)
        if p == 1:  # a sum: the formula multiplies zero by infinity where an entry is zero
            return torch.zeros_like(mat)
        slope = grad_output * _power_slope(u, p)
        change = over_columns(lambda m: self._sum(view, m), x ** (p - 1) * mat)
        curvature = torch.where(u != 0, (1 - p) * slope / u, 0.0)
        own = (p - 1) * x ** (p - 2) * mat * self._transposed_sum(view, slope[None])
        return own + x ** (p - 1) * self._transposed_sum(view, curvature * change)

    def _sums(self, view: View) -> Tensor:
        x = view.input
        return view.once("sums", lambda: self._sum(view, x ** _power(view)))

    def _sum(self, view: View, x: Tensor) -> Tensor:
        """``k · avg``; beyond the border, torch averages over fewer than ``k`` entries."""
        module = cast(LPPool2d, view.module)
        dims = len(view.input_shape) - 2
        size = module.kernel_size
        count = size**dims if isinstance(size, int) else torch.Size(size).numel()
        pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        mean: Tensor = pool(x, size, module.stride, 0, module.ceil_mode)
        return count * mean

    def _transposed_sum(self, view: View, mat: Tensor) -> Tensor:
        return transposed(lambda x: self._sum(view, x), view.input_shape[1:], mat)


def _power(view: View) -> float:
    return float(cast(LPPool2d, view.module).norm_type)


def _power_slope(u: Tensor, p: float) -> Tensor:
    """``p`` times the derivative of ``u^(1/p)``."""
    return torch.where(u != 0, u ** (1 / p - 1), 0.0)


def _tall(view: View, x: Tensor) -> Tensor:
    return x.unsqueeze(-2) if len(view.input_shape) == 3 else x


def _flat(view: View, x: Tensor) -> Tensor:
    return x.squeeze(-2) if len(view.input_shape) == 3 else x


def _shape_only(view: View, folded: Tensor) -> Tensor:
    """A tensor without memory, for kernels that look only at the shape of the input."""
    return _tall(view, folded.new_empty(()).expand(len(folded), *view.input_shape[1:]))
