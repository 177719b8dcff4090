"""Unfolded inputs of convolutions, by layer rules. Imports core's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Conv3d, Module
from torch.nn import functional as F

from backpack.utils.parameters import squares
from backpack_compat.views import made_view, unfolded


def get_conv_module(N: int) -> type[Module]:
    """The convolution with ``N`` spatial dimensions, as a module."""
    return {1: Conv1d, 2: Conv2d, 3: Conv3d}[N]


def get_conv_function(N: int) -> Callable[..., Tensor]:
    """The convolution with ``N`` spatial dimensions, as a function."""
    return {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[N]


def unfold_input(module: Module, input: Tensor) -> Tensor:
    """What the kernel sees at each position of the output.

    Args:
        module: The convolution.
        input: Its input ``[N, C, *]``.

    Returns:
        Shape ``[N, C·K, S]``: ``K`` kernel elements, ``S`` positions, as ``torch.nn.Unfold``.
    """
    with torch.no_grad():
        output = type(module).forward(module, input)
    return unfolded(module, made_view(module, (input,), output))


def unfold_by_conv(input: Tensor, module: Module) -> Tensor:
    """As :func:`unfold_input`."""
    return unfold_input(module, input)


def get_weight_gradient_factors(
    input: Tensor, grad_out: Tensor, module: Module
) -> tuple[Tensor, Tensor]:
    """The unfolded input ``[N, C·K, S]``, and the output gradient ``[N, O, S]``."""
    return unfold_input(module, input), grad_out.flatten(2)


def extract_weight_diagonal(
    module: Module, unfolded_input: Tensor, S: Tensor, sum_batch: bool = True
) -> Tensor:
    """``diag(Σ_v JᵀS_v (JᵀS_v)ᵀ)`` for the weight.

    Args:
        module: The convolution, with its inputs and output.
        unfolded_input: Not needed; the layer rule unfolds the input.
        S: Columns at the output ``[V, N, *out]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Shape ``[*weight]``, or ``[N, *weight]``.
    """
    return squares(module, "weight", S, sum_batch)


def extract_bias_diagonal(module: Any, S: Tensor, sum_batch: bool = True) -> Tensor:
    """The same for the bias."""
    return squares(module, "bias", S, sum_batch)
