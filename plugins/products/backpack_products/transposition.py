"""Transposes of linear maps that are given as functions: ``Aᵀ v`` from ``w ↦ A w``.

A rule that knows one of the two products need not implement the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def somewhere(tensor: Tensor) -> Tensor:
    """A point where a linear function can be differentiated, with the shape of a tensor.

    No entry is zero, since some formulas of linear maps are not differentiable there: the backward
    of ``logcumsumexp`` takes logarithms of gradients.
    """
    count = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device)
    return (count.cos() + 1.5).to(tensor.dtype).reshape(tensor.shape).requires_grad_()


def transpose(function: Callable[[Tensor], Tensor], shape: Sequence[int], vector: Tensor) -> Tensor:
    """The transpose of a linear map, applied to a vector.

    The gradient of ``⟨A w, v⟩`` in ``w`` is ``Aᵀ v``, at any ``w``. Unlike forward mode, this does
    not run the module again, so random numbers and fused kernels do not matter.

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
