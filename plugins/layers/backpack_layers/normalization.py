"""Rules of normalisation: rows of the input are centred and scaled, then an affine map follows.

A *row* is the set of entries that share a mean and a variance. With ``x̂ = (x - μ) / σ``, the output
is ``weight · x̂ + bias``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, cast

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

from backpack_core.calls import ModuleCall
from backpack_core.rules import ParametricRule
from backpack_layers.arguments import once
from backpack_layers.layout import require_axes, require_channels


class NormalizationRule(ParametricRule):
    """Rows of one sample, normalised by their own statistics or by fixed ones.

    Class attributes:
        centred: The mean is subtracted.
    """

    params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    linear_in_params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    centred: ClassVar[bool] = True

    @abstractmethod
    def rows(self, call: ModuleCall) -> int:
        """Number of rows of one sample, which are consecutive in memory."""

    @abstractmethod
    def parameter_axes(self, call: ModuleCall) -> tuple[int, int]:
        """First axis of the input that the parameters have, and the first after them."""

    def fixed_statistics(self, call: ModuleCall) -> bool:
        """Whether mean and variance are running statistics, one for each row."""
        return False

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        if self.fixed_statistics(call):
            return mat * self._slope(call)
        return self._project(call, mat * self._weight(call))

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        if self.fixed_statistics(call):
            return mat * self._slope(call)
        return self._project(call, mat) * self._weight(call)

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        product = mat if name == "bias" else mat * self._normalised(call)
        first, stop = self.parameter_axes(call)
        inner = [a + 1 for a in range(1, len(call.input_shape)) if not first <= a < stop]
        return product.sum(inner) if inner else product

    def _param_jac_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        factor = self._spread(call, mat)
        if name == "bias":
            return factor.expand(len(mat), *call.output_shape)
        return factor * self._normalised(call)

    def _second_derivative_mat_prod(
        self, call: ModuleCall, grad_output: Tensor, mat: Tensor
    ) -> Tensor:
        if self.fixed_statistics(call):
            return torch.zeros_like(mat)
        u, scale = self._rows_of(call, self._normalised(call)), self._statistics(call)[1]
        g = self._rows_of(call, grad_output * self._weight(call))
        m = self._rows_of(call, mat)
        gu, um = _mean(g * u), _mean(u * m)
        if self.centred:
            g, m = g - _mean(g), m - _mean(m)
        # The derivative of (g - u <g, u>) / σ, where <·,·> is the mean over a row.
        du = scale * (m - u * um)
        change = -(scale**2) * um * (g - u * gu) - scale * (du * gu + u * _mean(g * du))
        return change.reshape(mat.shape)

    def _project(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """The Jacobian of ``x̂``, which is symmetric."""
        mean, scale = self._statistics(call)
        rows, g = self._rows_of(call, call.input), self._rows_of(call, mat)
        # On GPUs, the kernel wants the statistics of half-precision rows in single precision.
        if self.centred and g.element_size() >= 4:
            return _layer_norm_backward(g, rows, mean, scale).reshape(mat.shape)
        u = (rows - mean) * scale
        inner = torch.linalg.vecdot(g, u).unsqueeze(-1) / u.shape[-1]
        if self.centred:
            g = g - _mean(g)
        return (torch.addcmul(g, u, inner, value=-1) * scale).reshape(mat.shape)

    def _statistics(self, call: ModuleCall) -> tuple[Tensor, Tensor]:
        """``μ`` and ``1/σ`` of every row. Shape ``[N, R, 1]``, or ``[1, R, 1]`` if fixed."""
        return once(call, "statistics", lambda: self._compute_statistics(call))

    def _compute_statistics(self, call: ModuleCall) -> tuple[Tensor, Tensor]:
        eps = cast(RMSNorm, call.module).eps
        if eps is None:
            eps = torch.finfo(call.inputs[0].dtype).eps
        if self.fixed_statistics(call):
            mean, var = (call.parameter(f"running_{name}") for name in ("mean", "var"))
            return mean.reshape(1, -1, 1), (var + eps).rsqrt().reshape(1, -1, 1)
        rows = self._rows_of(call, call.input)
        if not self.centred:
            return rows.new_zeros(()), (_mean(rows**2) + eps).rsqrt()
        if rows.device.type == "cpu" and rows.element_size() >= 4 and not torch.is_grad_enabled():
            # Several times as fast, but only its first result has a derivative.
            return torch.native_layer_norm(rows, rows.shape[-1:], None, None, eps)[1:]
        variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
        return mean, (variance + eps).rsqrt()

    def _normalised(self, call: ModuleCall) -> Tensor:
        """``x̂``, in the shape of the input."""
        x = call.input
        mean, scale = self._statistics(call)
        return once(
            call,
            "normalised",
            lambda: ((self._rows_of(call, x) - mean) * scale).reshape(x.shape),
        )

    def _rows_of(self, call: ModuleCall, x: Tensor) -> Tensor:
        """``[..., N, *in] → [..., N, R, D]``."""
        lead = x.shape[: x.dim() - len(call.input_shape) + 1]
        return x.reshape(*lead, self.rows(call), -1)

    def _slope(self, call: ModuleCall) -> Tensor:
        scale = self._statistics(call)[1].flatten()
        return self._spread(call, scale) * self._weight(call)

    def _weight(self, call: ModuleCall) -> Tensor | float:
        if cast(LayerNorm, call.module).weight is None:
            return 1.0
        return self._spread(call, call.parameter("weight"))

    def _spread(self, call: ModuleCall, values: Tensor) -> Tensor:
        """``[..., *θ]`` to where it broadcasts with ``[..., N, *in]``."""
        first, stop = self.parameter_axes(call)
        shape = [n if first <= a < stop else 1 for a, n in enumerate(call.input_shape)]
        return values.reshape(*values.shape[: values.dim() - (stop - first)], *shape)


class _TrailingAxesRule(NormalizationRule):
    """A row is what ``normalized_shape`` spans."""

    def check(self, call: ModuleCall) -> None:
        """Refuse an input without a batch axis."""
        shape = cast(LayerNorm, call.module).normalized_shape
        require_axes(call, len(shape) + 1, f"[N, ..., {', '.join(map(str, shape))}]")

    def rows(self, call: ModuleCall) -> int:
        """The axes between the batch and ``normalized_shape``."""
        return call.input_shape[1 : self.parameter_axes(call)[0]].numel()

    def parameter_axes(self, call: ModuleCall) -> tuple[int, int]:
        """The axes of ``normalized_shape``."""
        dims = len(call.input_shape)
        return dims - len(cast(LayerNorm, call.module).normalized_shape), dims


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

    def rows(self, call: ModuleCall) -> int:
        """The number of groups."""
        return cast(GroupNorm, call.module).num_groups

    def parameter_axes(self, call: ModuleCall) -> tuple[int, int]:
        """The channels."""
        return 1, 2


class InstanceNormRule(NormalizationRule):
    """A row is a channel; with ``track_running_stats``, eval mode uses running statistics."""

    module_types = (InstanceNorm1d, InstanceNorm2d, InstanceNorm3d)

    def check(self, call: ModuleCall) -> None:
        """Refuse an input without a batch axis."""
        require_channels(call)

    def rows(self, call: ModuleCall) -> int:
        """The number of channels."""
        return call.input_shape[1]

    def parameter_axes(self, call: ModuleCall) -> tuple[int, int]:
        """The channels."""
        return 1, 2

    def fixed_statistics(self, call: ModuleCall) -> bool:
        """In eval mode, where they are tracked."""
        module = cast(InstanceNorm2d, call.module)
        return module.track_running_stats and not call.training


class BatchNormRule(NormalizationRule):
    """With running statistics, an affine map of every channel; otherwise samples mix."""

    module_types = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
    hessian_is_zero = True
    jacobian_is_constant = True

    def mixes_samples(self, call: ModuleCall) -> bool:
        """In train mode, and in eval mode where no running statistics are kept."""
        module = cast(BatchNorm2d, call.module)
        return call.training or module.running_mean is None

    def rows(self, call: ModuleCall) -> int:
        """The number of channels."""
        return call.input_shape[1]

    def parameter_axes(self, call: ModuleCall) -> tuple[int, int]:
        """The channels."""
        return 1, 2

    def fixed_statistics(self, call: ModuleCall) -> bool:
        """Wherever samples do not mix."""
        return True


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(-1, keepdim=True)


def _layer_norm_backward(g: Tensor, rows: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The fused kernel of torch: three times as fast as the formula, although it copies the rows.

    Its own derivative in the rows covers what mean and scale depend on, so these are constants.
    """
    row, *constants = (
        t.expand(len(g), *t.shape).flatten(0, 1).contiguous()
        for t in (rows, mean.detach(), scale.detach())
    )
    product: Tensor = torch.ops.aten.native_layer_norm_backward(
        g.flatten(0, 1), row, [row.shape[-1]], *constants, None, None, [True, False, False]
    )[0]
    return product
