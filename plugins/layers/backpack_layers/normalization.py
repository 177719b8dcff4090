"""Rules of normalisation: rows of the input are centred and scaled, then an affine map follows.

A *row* is the set of entries that share a mean and a variance. With ``x̂ = (x - μ) / σ``, the output
is ``weight · x̂ + bias``.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod, sqrt
from typing import ClassVar, Final, cast

import torch
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
    SyncBatchNorm,
)
from torch.nn.functional import rms_norm

from backpack_core.record.view import View
from backpack_layers.layout import require_axes, require_channels
from backpack_products import ScaleProduct
from backpack_products.parametric import ProductRule
from backpack_products.some_samples import saved_in
from backpack_products.values import at_least_single

# Whether torch takes the ``eps`` of single precision for half precision; 2.6 takes its own.
_HALF = torch.full((1,), 2.0**-10, dtype=torch.float16, device="cpu")
_IS_WIDENED: Final = bool(rms_norm(_HALF, (1,)) > 0.5)


class NormalizationRule(ProductRule):
    """Rows of one sample, normalised by their own statistics or by fixed ones.

    Class attributes:
        centred: The mean is subtracted.
    """

    params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    linear_in_params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    centred: ClassVar[bool] = True

    @abstractmethod
    def rows(self, view: View) -> int:
        """Number of rows of one sample, which are consecutive in memory."""

    @abstractmethod
    def parameter_axes(self, view: View) -> tuple[int, int]:
        """First axis of the input that the parameters have, and the first after them."""

    def fixed_statistics(self, view: View) -> bool:
        """Whether mean and variance are running statistics, one for each row."""
        return False

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        if self.fixed_statistics(view):
            return (mat * self._slope(view)).to(mat.dtype)
        return self._project(view, mat * self._weight(view))

    def _param_product(self, view: View, name: str, mat: Tensor) -> ScaleProduct:
        inp = None if name == "bias" else self._by_entry(view, self._normalised(view))
        shape = view.parameter_itself(name).shape
        product = ScaleProduct(self._by_entry(view, mat), inp, shape)
        if inp is not None and self.centred and view.is_measured:
            mean, scale = self._statistics(view)
            norm = torch.linalg.vector_norm((mean * scale).detach())
            product.terms = norm * sqrt(inp.numel() / max(1, mean.numel()))
        return product

    def _by_entry(self, view: View, x: Tensor) -> Tensor:
        """``[..., N, *in] → [..., N, S, D]`` with the entries of a parameter last."""
        first, stop = self.parameter_axes(view)
        lead = x.dim() - len(view.input_shape)
        entries = x.shape[lead + first : lead + stop].numel()
        inner = x.flatten(lead + first, lead + stop - 1) if stop - first > 1 else x
        moved = inner.movedim(lead + first, -1)
        positions = moved.shape[lead + 1 :].numel() // max(1, entries)
        return moved.reshape(*x.shape[: lead + 1], positions, entries)

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        if self.fixed_statistics(view):
            return torch.zeros_like(mat)
        u, scale = self._rows_of(view, self._normalised(view)), self._statistics(view)[1]
        g = self._rows_of(view, grad_output * self._weight(view))
        m = self._rows_of(view, mat)
        gu, um = _mean(g * u), _mean(u * m)
        if self.centred:
            g, m = g - _mean(g), m - _mean(m)
        # The derivative of (g - u <g, u>) / σ, where <·,·> is the mean over a row.
        du = scale * (m - u * um)
        change = -(scale**2) * um * (g - u * gu) - scale * (du * gu + u * _mean(g * du))
        return change.reshape(mat.shape).to(mat.dtype)

    def _project(self, view: View, mat: Tensor) -> Tensor:
        """The Jacobian of ``x̂``, which is symmetric."""
        mean, scale = self._statistics(view)
        rows, g = self._rows_of(view, view.input), self._rows_of(view, mat)
        # On GPUs, the kernel needs the statistics of half-precision rows in single precision.
        if self.centred and g.element_size() >= 4:
            return _layer_norm_backward(g, rows, mean, scale).reshape(mat.shape)
        u, g = (rows - mean) * scale, at_least_single(g)
        inner = torch.linalg.vecdot(g, u).unsqueeze(-1) / u.shape[-1]
        if self.centred:
            g = g - _mean(g)
        found = torch.addcmul(g, u, inner, value=-1) * scale
        return found.reshape(mat.shape).to(mat.dtype)

    def _statistics(self, view: View) -> tuple[Tensor, Tensor]:
        """``μ`` and ``1/σ`` of every row. Shape ``[N, R, 1]``, or ``[1, R, 1]`` if fixed.

        At least in single precision, as in torch: squares leave the range of half precision.
        """
        return view.once("statistics", lambda: self._compute_statistics(view))

    def _compute_statistics(self, view: View) -> tuple[Tensor, Tensor]:
        eps = cast(RMSNorm, view.module).eps
        if eps is None:
            dtype = view.inputs[0].dtype
            wide = torch.promote_types(dtype, torch.float32)
            eps = torch.finfo(wide if _IS_WIDENED else dtype).eps
        if self.fixed_statistics(view):
            names = "running_mean", "running_var"
            mean, var = (at_least_single(view.parameter(name)) for name in names)
            return mean.reshape(1, -1, 1), (var + eps).rsqrt().reshape(1, -1, 1)
        rows = at_least_single(self._rows_of(view, view.input))
        if not rows.numel():  # torch would warn
            return rows.new_zeros(*rows.shape[:-1], 1), rows.new_ones(*rows.shape[:-1], 1)
        if not self.centred:
            return rows.new_zeros(()), (_mean_square(rows) + eps).rsqrt()
        saved = self._saved_statistics(view, rows)
        if saved is not None:
            return saved
        if rows.device.type == "cpu" and not torch.is_grad_enabled():
            # Several times as fast, but only its first result has a derivative.
            return torch.native_layer_norm(rows, rows.shape[-1:], None, None, eps)[1:]
        variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def _saved_statistics(view: View, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """What the kernels of layers and groups keep for their own backward pass."""
        if view.is_differentiable:
            return None
        mean, scale = saved_in(view, "result1"), saved_in(view, "result2")
        shape = (*rows.shape[:-1], 1)
        for found in (mean, scale):
            if found is None or found.dtype != rows.dtype or found.numel() != prod(shape):
                return None
        assert mean is not None
        assert scale is not None
        return mean.reshape(shape), scale.reshape(shape)

    def _normalised(self, view: View) -> Tensor:
        """``x̂``, in the shape of the input."""
        return view.once("normalised", lambda: self._normalise(view))

    def _normalise(self, view: View) -> Tensor:
        x = view.input
        mean, scale = self._statistics(view)
        if not self.centred:
            return (self._rows_of(view, x) * scale).reshape(x.shape).to(x.dtype)
        centred = self._rows_of(view, x) - mean
        normalised = centred * scale if torch.is_grad_enabled() else centred.mul_(scale)
        return normalised.reshape(x.shape).to(x.dtype)

    def _rows_of(self, view: View, x: Tensor) -> Tensor:
        """``[..., N, *in] → [..., N, R, D]``."""
        lead = x.shape[: x.dim() - len(view.input_shape) + 1]
        rows = self.rows(view)
        return x.reshape(*lead, rows, view.input_shape[1:].numel() // max(1, rows))

    def _slope(self, view: View) -> Tensor:
        scale = self._statistics(view)[1].flatten()
        return self._broadcast(view, scale) * self._weight(view)

    def _weight(self, view: View) -> Tensor | float:
        if cast(LayerNorm, view.module).weight is None:
            return 1.0
        return self._broadcast(view, view.parameter("weight"))

    def _broadcast(self, view: View, values: Tensor) -> Tensor:
        """``[..., *θ]`` to where it broadcasts with ``[..., N, *in]``."""
        first, stop = self.parameter_axes(view)
        shape = [n if first <= a < stop else 1 for a, n in enumerate(view.input_shape)]
        return values.reshape(*values.shape[: values.dim() - (stop - first)], *shape)


class _TrailingAxesRule(NormalizationRule):
    """A row is what ``normalized_shape`` spans."""

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        shape = cast(LayerNorm, view.module).normalized_shape
        if len(view.input_shape) <= len(shape):  # to form the text takes longer than the check
            require_axes(view, len(shape) + 1, f"[N, ..., {', '.join(map(str, shape))}]")

    def rows(self, view: View) -> int:
        """The axes between the batch and ``normalized_shape``."""
        return view.input_shape[1 : self.parameter_axes(view)[0]].numel()

    def parameter_axes(self, view: View) -> tuple[int, int]:
        """The axes of ``normalized_shape``."""
        dims = len(view.input_shape)
        return dims - len(cast(LayerNorm, view.module).normalized_shape), dims

    def _rows_of(self, view: View, x: Tensor) -> Tensor:
        """A view; the input itself if there are no axes to merge."""
        lead = x.dim() - len(view.input_shape) + 1
        first = x.dim() - len(cast(LayerNorm, view.module).normalized_shape)
        if first == lead + 1 == x.dim() - 1:
            return x
        return x.reshape(*x.shape[:lead], x.shape[lead:first].numel(), x.shape[first:].numel())

    def _by_entry(self, view: View, x: Tensor) -> Tensor:
        """Rows are positions."""
        return self._rows_of(view, x)


class LayerNormRule(_TrailingAxesRule):
    """A row is what ``normalized_shape`` spans."""

    module_types = (LayerNorm,)


class RMSNormRule(_TrailingAxesRule):
    """A row is what ``normalized_shape`` spans; no mean, no bias."""

    module_types = (RMSNorm,)
    params = ("weight",)
    linear_in_params = ("weight",)
    centred = False


class GroupNormRule(NormalizationRule):
    """A row is a group of channels."""

    module_types = (GroupNorm,)

    def rows(self, view: View) -> int:
        """The number of groups."""
        return cast(GroupNorm, view.module).num_groups

    def parameter_axes(self, view: View) -> tuple[int, int]:
        """The channels."""
        return 1, 2


class InstanceNormRule(NormalizationRule):
    """A row is a channel; with ``track_running_stats``, eval mode uses running statistics."""

    module_types = (InstanceNorm1d, InstanceNorm2d, InstanceNorm3d)

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_channels(view)

    def rows(self, view: View) -> int:
        """The number of channels."""
        return view.input_shape[1]

    def parameter_axes(self, view: View) -> tuple[int, int]:
        """The channels."""
        return 1, 2

    def fixed_statistics(self, view: View) -> bool:
        """In eval mode, if they are tracked."""
        module = cast(InstanceNorm2d, view.module)
        return module.track_running_stats and not view.training


class BatchNormRule(NormalizationRule):
    """An affine map of every channel with running statistics; with the batch's, samples mix."""

    module_types = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
    hessian_is_zero = True
    jacobian_is_constant = True

    def mixes_samples(self, view: View) -> bool:
        """In train mode, and in eval mode without running statistics."""
        module = cast(BatchNorm2d, view.module)
        return view.training or module.running_mean is None

    def rows(self, view: View) -> int:
        """The number of channels."""
        return view.input_shape[1]

    def parameter_axes(self, view: View) -> tuple[int, int]:
        """The channels."""
        return 1, 2

    def fixed_statistics(self, view: View) -> bool:
        """Wherever samples do not mix."""
        return True


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(-1, keepdim=True)


def _mean_square(rows: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return _mean(rows**2)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)  # writes no squares
    return norms.square_().div_(max(1, rows.shape[-1]))


def _layer_norm_backward(g: Tensor, rows: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Torch's fused kernel: three times as fast as the formula, although it copies the rows.

    Its derivative in the rows includes the dependence of mean and scale, so these are detached.
    """
    row, *constants = (
        t.expand(len(g), *t.shape).flatten(0, 1).contiguous()
        for t in (rows, mean.detach(), scale.detach())
    )
    product: Tensor = torch.ops.aten.native_layer_norm_backward(
        g.flatten(0, 1), row, [row.shape[-1]], *constants, None, None, [True, False, False]
    )[0]
    return product
