"""How many multiply-adds a quantity needs at least, counted layer by layer.

What is counted: the products of the gradient itself; for each sample the product of output
gradient and input where positions share a weight, or the squares' product where they do not; a
transposed Jacobian product for each column and layer; covariances as symmetric products. Norms take
the cheaper of the product and the Gram matrices over positions. Elementwise work counts nothing.
The bytes of the result are added at the rate of a first write to fresh memory. All products are
assumed to run at the rate of the gradient's, which is low for nets as small as logistic regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from benchmarks.problems import Problem
from benchmarks.quantities import Quantity

_CURVED = (nn.Sigmoid, nn.LayerNorm, nn.MultiheadAttention)


@dataclass(frozen=True)
class Layer:
    """An affine map ``y[n, s, g] = W[g] x[n, s, g]``, or a product of activations (no params).

    Attributes:
        positions: ``S``.
        inputs: ``G · I``.
        outputs: ``O``.
        groups: ``G``.
        params: Number of parameters.
        first: Its input needs no gradient.
    """

    positions: int
    inputs: int
    outputs: int
    groups: int
    params: int
    first: bool

    @property
    def product(self) -> int:
        """Multiply-adds of the layer for one sample: forward, transposed, or for the weight."""
        return self.positions * self.inputs * self.outputs

    @property
    def back(self) -> int:
        """Multiply-adds of one column through the layer. Two factors where both are activations."""
        if not self.params:
            return 2 * self.product
        return 0 if self.first else self.product


@dataclass(frozen=True)
class Limit:
    """Lower bound, relative to the gradient: ``work`` (without bytes) and bytes of the result."""

    work: float
    result_bytes: int

    def time(self, gradient: float, write_rate: float) -> float:
        """Seconds that are needed at least, if the gradient takes ``gradient`` seconds."""
        return self.work * gradient + self.result_bytes / write_rate


def layers(problem: Problem) -> list[Layer]:
    """The affine maps of a net, in order."""
    model, found = problem.model(), []

    def visit(module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
        found.extend(_of_module(module, args, result, first=not found))

    for module in model.modules():
        module.register_forward_hook(visit)
    model(problem.data(1)[0])
    return found


def _of_module(
    module: nn.Module, args: tuple[Tensor, ...], result: Any, first: bool
) -> list[Layer]:
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


def limit(problem: Problem, quantity: Quantity, batch: int) -> Limit | None:
    """The lower bound, or ``None`` where it was not worked out."""
    net = layers(problem)
    gradient = sum(2 * layer.product + layer.back for layer in net)  # for a sample
    params = sum(layer.params for layer in net)
    columns = problem.classes if quantity.exact else 1
    weights = [layer for layer in net if layer.params]
    per_sample = sum(layer.product for layer in weights)
    carry = columns * sum(layer.back for layer in net)
    squares = sum(_squares(layer, columns) for layer in weights)
    factors = sum(_factors(layer, columns) for layer in weights)
    norms = sum(_norm(layer) for layer in weights)
    work, size = {
        "BatchGrad": (per_sample, params * batch),
        "BatchL2Grad": (norms, 0),
        "SumGradSquared": (squares, 0),
        "Variance": (squares, 0),
        "FirstFour": (per_sample, params * batch),
        "BatchDotGrad": (None, 0),
        "ClippedSumGrad": (norms + per_sample, 0),
        "DiagGGNMC": (carry + squares, 0),
        "DiagGGNExact": (carry + squares, 0),
        "BatchDiagGGNMC": (carry + squares, params * batch),
        "BatchDiagGGNExact": (carry + squares, params * batch),
        "SqrtGGNMC": (carry + columns * per_sample, params * batch * columns),
        "SqrtGGNExact": (carry + columns * per_sample, params * batch * columns),
        "KFAC": (carry + factors, 0),
        "KFLR": (carry + factors, 0),
        "GGNTogether": (carry + squares + factors, params * batch),
    }.get(quantity.name, (None, 0))
    return None if work is None else Limit(1 + work / gradient, 4 * size)


def largest(problem: Problem, quantity: Quantity, bound: Limit | None) -> int:
    """Bytes of the largest tensor that cannot be avoided, if it is large."""
    width = max(layer.positions * layer.outputs * layer.groups for layer in layers(problem))
    if quantity.square:
        return 2 * 4 * width * width  # and its product with a Jacobian
    if quantity.curved and any(isinstance(m, _CURVED) for m in problem.model().modules()):
        return 4 * problem.exact_batch * width * width
    return 0 if bound is None else bound.result_bytes


def _squares(layer: Layer, columns: int) -> int:
    """Without shared positions one product of squares serves all columns."""
    return layer.product * (columns if layer.positions > 1 else 1)


def _norm(layer: Layer) -> int:
    gram = layer.positions**2 * (layer.inputs + layer.outputs * layer.groups)
    return min(layer.product, gram) if layer.positions > 1 else layer.inputs + layer.outputs


def _factors(layer: Layer, columns: int) -> float:
    inner = layer.positions * layer.groups * (layer.inputs // layer.groups) ** 2
    return (inner + columns * layer.groups * layer.outputs**2) / 2
