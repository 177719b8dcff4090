"""The backward pass of a convolution as a function that is differentiated by convolutions.

Torch's derivative of it takes five convolutions, some of them by a slow kernel, even if the
gradient of the image or of the kernel is not needed. Here, it takes two for each that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backpack_operations.nodes import wanted_inputs

Grads: TypeAlias = tuple[Tensor | None, ...]


def of_convolution(node: Any, arrived: Tensor | None) -> Grads | Callable[[Grads], Grads]:
    """The gradients at the image, the kernel and the bias, from those that the node computed."""
    if arrived is None:
        return None, None, None
    geometry = (
        *(node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed),
        *(node._saved_output_padding, node._saved_groups),
    )
    given = arrived, node._saved_input, node._saved_weight
    return lambda found: _Sent.apply(*given, geometry, found)  # type: ignore[no-untyped-call]


class _Sent(torch.autograd.Function):
    """``u, x, W ↦ (K_Wᵀ u, K_xᵀ u, Σ u)``, where ``K_W x = K_x W = W * x``.

    With directions ``(a, b, c)``, its derivatives are ``W * a + b * x + c`` in ``u``, ``K_bᵀ u`` in
    ``x`` and ``K_aᵀ u`` in ``W``.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Grads:
        """The gradients, which torch has computed."""
        *tensors, ctx.geometry, found = given
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple([None if gradient is None else gradient.detach() for gradient in found])

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Grads:
        """The derivatives that are needed, in operations that can be differentiated."""
        arrived, image, kernel = ctx.saved_tensors
        of_image, of_kernel, of_offset = directions
        to_arrived, to_image, to_kernel, *_ = wanted_inputs(ctx)
        gradient = in_image = in_kernel = None
        if to_arrived and of_kernel is not None:
            gradient = torch.convolution(image, of_kernel, of_offset, *ctx.geometry)
        if to_arrived and of_image is not None:
            offset = of_offset if gradient is None else None
            sent = torch.convolution(of_image, kernel, offset, *ctx.geometry)
            gradient = sent if gradient is None else gradient.add_(sent)
        if to_arrived and gradient is None and of_offset is not None:
            gradient = of_offset.reshape(-1, *[1] * (image.dim() - 2)).expand_as(arrived)
        back, geometry = torch.ops.aten.convolution_backward, ctx.geometry
        if to_image and of_kernel is not None:
            in_image, *_ = back(arrived, image, of_kernel, None, *geometry, (True, False, False))
        if to_kernel and of_image is not None:
            _, in_kernel, _ = back(arrived, of_image, kernel, None, *geometry, (False, True, False))
        return gradient, in_image, in_kernel, None, None


# The type of the nodes that are made here.
SENT: Any = _Sent._backward_cls
