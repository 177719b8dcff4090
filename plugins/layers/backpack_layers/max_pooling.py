"""Rules of max pooling and unpooling, which move entries between known positions."""

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

from backpack_core.errors import OverwrittenInputError
from backpack_core.record.view import View
from backpack_layers.layout import require_channels
from backpack_products.derivatives import SecondOrderRule
from backpack_products.some_samples import saved_in


class MaxPoolRule(SecondOrderRule):
    """The maximum of every window; windows are fixed, adaptive or random."""

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

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_channels(view)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        index = self._winners(view)
        product = mat.new_zeros(len(mat), view.input_shape.numel())
        # One index for all columns is several times faster than scattering along the pixels.
        product.index_add_(1, index, mat.flatten(1))
        return product.reshape(len(mat), *view.input_shape)

    def _winners(self, view: View) -> Tensor:
        """For every output entry, the position of its maximum in the flattened input."""
        return view.once("winners", lambda: flat_positions(_positions(view), view.input_shape))


class MaxUnpoolRule(SecondOrderRule):
    """Puts entries at the positions of a pooling's maxima, and zeros elsewhere."""

    module_types = (MaxUnpool1d, MaxUnpool2d, MaxUnpool3d)
    hessian_is_zero = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_channels(view)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        targets = flat_positions(view.tensor_input(1), view.output_shape)
        return mat.flatten(1).index_select(1, targets).reshape(len(mat), *view.input_shape)


def flat_positions(positions: Tensor, shape: torch.Size) -> Tensor:
    """Turn positions within the pixels of a channel into positions in all of ``[N, C, *]``."""
    channels, pixels = shape[:2].numel(), shape[2:].numel()
    starts = torch.arange(channels, device=positions.device).unsqueeze(1) * pixels
    return (positions.reshape(channels, positions.shape[2:].numel()) + starts).flatten()


def _positions(view: View) -> Tensor:
    """The indices of the maxima, as ``return_indices=True`` returns them."""
    module = cast(Any, view.module)
    if module.return_indices:
        drawn = view.values.outputs[1]
        return drawn if view.indices is None else drawn[list(view.indices)]
    kept = saved_in(view, "result1")
    if kept is not None and kept.shape == view.output_shape and kept.dtype == torch.long:
        return kept
    x, dims = view.input, len(view.input_shape) - 2
    if isinstance(module, (FractionalMaxPool2d, FractionalMaxPool3d)):
        raise OverwrittenInputError(
            f"{view.path} drew random windows that are not stored: make it with "
            "return_indices=True."
        )
    if isinstance(module, (AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d)):
        adaptive: Any = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
        return cast(Tensor, adaptive[dims - 1](x, module.output_size, return_indices=True)[1])
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    settings = (module.kernel_size, module.stride, module.padding, module.dilation)
    return cast(Tensor, pool(x, *settings, module.ceil_mode, return_indices=True)[1])
