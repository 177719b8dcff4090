"""Rules of pooling by maximum, and of unpooling: entries are moved, by positions that are known."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import (
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    FractionalMaxPool2d,
    FractionalMaxPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
)

from backpack_core.calls import ModuleCall
from backpack_core.errors import OverwrittenInputError
from backpack_core.rules import LayerRule
from backpack_layers.arguments import once
from backpack_layers.layout import require_channels


class MaxPoolRule(LayerRule):
    """The maximum of every window, with windows set, adaptive or random."""

    module_types = (
        MaxPool1d,
        MaxPool2d,
        MaxPool3d,
        AdaptiveMaxPool1d,
        AdaptiveMaxPool2d,
        AdaptiveMaxPool3d,
        FractionalMaxPool2d,
        FractionalMaxPool3d,
    )
    hessian_is_zero = True

    def check(self, call: ModuleCall) -> None:
        """Refuse an input without a batch axis."""
        require_channels(call)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        index = self._winners(call)
        product = mat.new_zeros(len(mat), call.input_shape.numel())
        # One index for all columns is several times faster than scattering along the pixels.
        product = product.index_add(1, index, mat.reshape(len(mat), -1))
        return product.reshape(len(mat), *call.input_shape)

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        product = mat.reshape(len(mat), -1).index_select(1, self._winners(call))
        return product.reshape(len(mat), *call.output_shape)

    def _winners(self, call: ModuleCall) -> Tensor:
        """For every output entry, the position of its maximum in the flattened input."""
        return once(call, "winners", lambda: flat_positions(_positions(call), call.input_shape))


class MaxUnpoolRule(LayerRule):
    """Puts entries where a pooling found its maxima, and zeros elsewhere."""

    module_types = (MaxUnpool1d, MaxUnpool2d, MaxUnpool3d)
    hessian_is_zero = True

    def check(self, call: ModuleCall) -> None:
        """Refuse an input without a batch axis."""
        require_channels(call)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        product = mat.reshape(len(mat), -1).index_select(1, self._targets(call))
        return product.reshape(len(mat), *call.input_shape)

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        product = mat.new_zeros(len(mat), call.output_shape.numel())
        # Not a sum: of two entries with one position, torch keeps one.
        product = product.index_copy(1, self._targets(call), mat.reshape(len(mat), -1))
        return product.reshape(len(mat), *call.output_shape)

    def _targets(self, call: ModuleCall) -> Tensor:
        return flat_positions(call.tensor_input(1), call.output_shape)


def flat_positions(positions: Tensor, shape: torch.Size) -> Tensor:
    """Turn positions within the pixels of a channel into positions in all of ``[N, C, *]``."""
    channels, pixels = shape[:2].numel(), shape[2:].numel()
    starts = torch.arange(channels, device=positions.device).unsqueeze(1) * pixels
    return (positions.reshape(channels, -1) + starts).flatten()


def _positions(call: ModuleCall) -> Tensor:
    """What ``return_indices=True`` returns."""
    module = cast(Any, call.module)
    if module.return_indices:
        return call.outputs[1]
    kept = call.saved("result1")
    if kept is not None and kept.shape == call.output_shape and kept.dtype == torch.long:
        return kept
    x, dims = call.input, len(call.input_shape) - 2
    if isinstance(module, (FractionalMaxPool2d, FractionalMaxPool3d)):
        raise OverwrittenInputError(
            f"{call.path} drew random windows that are not stored: make it with "
            "return_indices=True."
        )
    if isinstance(module, (AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d)):
        adaptive: Any = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
        return cast(Tensor, adaptive[dims - 1](x, module.output_size, return_indices=True)[1])
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    settings = (module.kernel_size, module.stride, module.padding, module.dilation)
    return cast(Tensor, pool(x, *settings, module.ceil_mode, return_indices=True)[1])
