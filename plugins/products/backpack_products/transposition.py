"""Transposes of linear maps that are written as functions.

A rule that knows ``A w`` gets ``Aᵀ v`` from it, and need not write a second formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def somewhere(tensor: Tensor) -> Tensor:
    """A place like a tensor, to differentiate a linear function at: none of its entries is zero.

    A linear function has one derivative everywhere, but not every formula of it: ``logcumsumexp``
    sends gradients back by way of their logarithms.
    """
    count = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device)
    return (count.cos() + 1.5).to(tensor.dtype).reshape(tensor.shape).requires_grad_()


def transpose(function: Callable[[Tensor], Tensor], shape: Sequence[int], vector: Tensor) -> Tensor:
    """The transpose of a linear map, applied to a vector.

    The gradient of ``⟨A w, v⟩`` in ``w`` is ``Aᵀ v``, at any ``w``. Unlike forward mode through the
    module, this needs no second run of it: random numbers, padding and fused kernels do not matter.

    Args:
        function: The linear map ``w ↦ A w``, in differentiable operations.
        shape: Shape of ``w``.
        vector: ``v``, of the shape of ``A w``.

    Returns:
        ``Aᵀ v``, of the given shape.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        w = somewhere(vector.new_empty(tuple(shape)))
        image = function(w)
        if not image.requires_grad:  # the map is zero
            return vector.new_zeros(tuple(shape))
        (result,) = torch.autograd.grad(
            image, w, vector, create_graph=create_graph, materialize_grads=True
        )
    return result
