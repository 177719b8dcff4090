"""The backward pass of a convolution as a function of the arriving gradient only.

Torch's derivative of it also computes gradients of the image and of the kernel, even if they are
not needed: five convolutions instead of two.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Grads: TypeAlias = tuple[Tensor | None, ...]


def of_convolution(node: Any, arrived: Tensor | None) -> Grads:
    """The gradients at the image, the kernel and the bias."""
    if arrived is None:
        return None, None, None
    wanted = [child is not None for child, _ in node.next_functions]
    geometry = (
        *(node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed),
        *(node._saved_output_padding, node._saved_groups),
    )
    image, kernel = node._saved_input, node._saved_weight
    grads: Grads = _Sent.apply(arrived, image.detach(), kernel.detach(), geometry, wanted)  # type: ignore[no-untyped-call]
    return grads


class _Sent(torch.autograd.Function):
    """``u ↦ (K_Wᵀ u, K_xᵀ u, Σ u)``, whose derivative is ``(a, b, c) ↦ W * a + b * x + c``."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, *given: Any) -> Grads:
        """The gradients, as torch computes them."""
        image, kernel, ctx.geometry, wanted = given
        ctx.save_for_backward(image, kernel)
        ctx.set_materialize_grads(False)
        ctx.shape, offset = arrived.shape, [arrived.shape[1]] if wanted[2] else None
        grads: Grads = torch.ops.aten.convolution_backward(
            arrived, image, kernel, offset, *ctx.geometry, wanted
        )
        return grads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *directions: Tensor | None) -> Grads:
        """The derivative, with at most two convolutions."""
        image, kernel = ctx.saved_tensors
        of_image, of_kernel, of_offset = directions
        gradient: Tensor | None = None
        if of_kernel is not None:
            gradient = torch.ops.aten.convolution(image, of_kernel, of_offset, *ctx.geometry)
        if of_image is not None:
            offset = of_offset if gradient is None else None
            sent = torch.ops.aten.convolution(of_image, kernel, offset, *ctx.geometry)
            gradient = sent if gradient is None else gradient.add_(sent)
        if gradient is None and of_offset is not None:
            gradient = of_offset.reshape(-1, *[1] * (image.dim() - 2)).expand(ctx.shape)
        return gradient, None, None, None, None
