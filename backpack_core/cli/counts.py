"""Lower bounds on the multiply-adds of a quantity, layer by layer.

The gradient counts its matrix products. A quantity counts in addition: for each sample, the product
of output gradient and input if positions share a weight, else one product of squares; a transposed
Jacobian product for each column and layer; covariances as symmetric products. Norms count the
cheaper of the product and the Gram matrices over positions. Elementwise work does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

# Quantities with a column for each output of the model; others have one column.
EXACT = frozenset({"DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "GGNTogether"})


@dataclass(frozen=True)
class Layer:
    """An affine map ``y[n, s, g] = W[g] x[n, s, g]``, or a product of activations (no parameters).

    Attributes:
        positions: ``S``.
        inputs: ``G · I``.
        outputs: ``O``.
        groups: ``G``.
        params: Number of parameters.
        first: Whether its input needs no gradient.
    """

    positions: int
    inputs: int
    outputs: int
    groups: int
    params: int
    first: bool

    @property
    def product(self) -> int:
        """Multiply-adds of one product for a sample: forward, transposed, or for the weight."""
        return self.positions * self.inputs * self.outputs

    @property
    def back(self) -> int:
        """Multiply-adds of propagating a column; twice as many for a product of activations."""
        if not self.params:
            return 2 * self.product
        return 0 if self.first else self.product


def of_module(module: nn.Module, args: tuple[Tensor, ...], result: Any, first: bool) -> list[Layer]:
    """The affine maps that a module consists of; empty if none are known.

    Args:
        module: The module.
        args: Its arguments.
        result: Its return value.
        first: Whether its input needs no gradient.
    """
    params = sum(p.numel() for p in module.parameters(recurse=False))
    if isinstance(module, nn.Linear):
        positions = args[0].shape[1:-1].numel()
        return [Layer(positions, module.in_features, module.out_features, 1, params, first)]
    if isinstance(module, _ConvNd):
        groups = module.groups
        inputs = module.in_channels * torch.Size(module.kernel_size).numel()
        positions = result.shape[2:].numel()
        return [Layer(positions, inputs, module.out_channels // groups, groups, params, first)]
    if isinstance(module, nn.MultiheadAttention):
        tokens, width = args[0].shape[1:]
        return [
            Layer(tokens, width, 3 * width, 1, params, first),
            Layer(tokens, width, width, 1, width * (width + 1), False),
            Layer(tokens, width, tokens, 1, 0, False),
            Layer(tokens, tokens, width, 1, 0, False),
        ]
    return []


def work(layer: Layer, quantity: str, columns: int) -> float | None:
    """Multiply-adds of a quantity at a layer in addition to the gradient, for one sample.

    Args:
        layer: The layer.
        quantity: Name of the extension.
        columns: How many columns are propagated.

    Returns:
        The count; ``None`` if there is no formula for the quantity.
    """
    carry = columns * layer.back
    if not layer.params:
        return carry if quantity in _CARRIED else 0
    at_parameters = {
        "BatchGrad": layer.product,
        "FirstFour": layer.product,
        "BatchL2Grad": _norm(layer),
        "SumGradSquared": _squares(layer, columns),
        "Variance": _squares(layer, columns),
        "ClippedSumGrad": _norm(layer) + layer.product,
        "SqrtGGNMC": columns * layer.product,
        "SqrtGGNExact": columns * layer.product,
        "KFAC": _factors(layer, columns),
        "KFLR": _factors(layer, columns),
        "GGNTogether": _squares(layer, columns) + _factors(layer, columns),
        **dict.fromkeys(_DIAGONALS, _squares(layer, columns)),
    }.get(quantity)
    return None if at_parameters is None else at_parameters + (carry if quantity in _CARRIED else 0)


_DIAGONALS = ("DiagGGNMC", "DiagGGNExact", "BatchDiagGGNMC", "BatchDiagGGNExact")
_CARRIED = {*_DIAGONALS, "SqrtGGNMC", "SqrtGGNExact", "KFAC", "KFLR", "GGNTogether"}


def result_size(quantity: str, params: int, batch: int, columns: int) -> int:
    """Number of elements of a result that is larger than the gradient; zero for others."""
    if quantity in ("SqrtGGNMC", "SqrtGGNExact"):
        return params * batch * columns
    per_sample = ("BatchGrad", "FirstFour", "BatchDiagGGNMC", "BatchDiagGGNExact", "GGNTogether")
    return params * batch if quantity in per_sample else 0


def _squares(layer: Layer, columns: int) -> int:
    """One product of squares serves all columns, unless positions share a weight."""
    return layer.product * (columns if layer.positions > 1 else 1)


def _norm(layer: Layer) -> int:
    gram = layer.positions**2 * (layer.inputs + layer.outputs * layer.groups)
    return min(layer.product, gram) if layer.positions > 1 else layer.inputs + layer.outputs


def _factors(layer: Layer, columns: int) -> float:
    inner = layer.positions * layer.groups * (layer.inputs // layer.groups) ** 2
    return (inner + columns * layer.groups * layer.outputs**2) / 2
