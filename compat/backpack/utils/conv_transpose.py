"""Unfolded inputs of transposed convolutions, by layer rules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Module
from torch.nn import functional as F

from backpack.utils.conv import (
    extract_bias_diagonal,
    extract_weight_diagonal,
    get_weight_gradient_factors,
    unfold_input,
)

__all__ = [
    "extract_bias_diagonal",
    "extract_weight_diagonal",
    "get_conv_transpose_function",
    "get_conv_transpose_module",
    "get_weight_gradient_factors",
    "unfold_by_conv_transpose",
]


def get_conv_transpose_module(N: int) -> type[Module]:
    """The transposed convolution with ``N`` spatial dimensions, as a module."""
    return {1: ConvTranspose1d, 2: ConvTranspose2d, 3: ConvTranspose3d}[N]


def get_conv_transpose_function(N: int) -> Callable[..., Tensor]:
    """The transposed convolution with ``N`` spatial dimensions, as a function."""
    return {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[N]


def unfold_by_conv_transpose(input: Tensor, module: Module) -> Tensor:
    """What the kernel sees at each position of the output, ``[N, C·K, S]``."""
    return unfold_input(module, input)
