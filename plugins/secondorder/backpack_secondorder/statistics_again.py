"""Third derivatives of normalisations: torch's treat the statistics as constants.

A net that contains a derivative of a normalisation (a penalty on gradients, a residual of a
differential equation) has a node that differentiates twice. Second derivatives of its loss need
third derivatives there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Grads: TypeAlias = tuple[Tensor | None, ...]
Normalise: TypeAlias = Callable[[Tensor], tuple[Tensor, list[int]]]


def of_layer_norm(node: Any, *arrived: Tensor | None) -> Grads:
    """``x`` without mean and scale, along the last axes; ``ε`` follows from the scale."""
    lengths, scale = node._saved_normalized_shape, node._saved_rstd

    def normalise(x: Tensor) -> tuple[Tensor, list[int]]:
        axes = [*range(-len(lengths), 0)]
        variance = x.var(axes, correction=0, keepdim=True)
        eps = (scale.reshape(variance.shape) ** -2 - variance).detach()
        return (x - x.mean(axes, keepdim=True)) * (variance + eps).rsqrt(), [*lengths]

    grad_out, x, weight = _again(node, node._saved_grad_out, arrived, normalise)
    return grad_out, x, None, None, weight, None


def of_batch_norm(node: Any, *arrived: Tensor | None) -> Grads:
    """The same for each channel, by statistics of the batch or known ones."""

    def normalise(x: Tensor) -> tuple[Tensor, list[int]]:
        shape, axes = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
        if node._saved_train:
            mean = x.mean(axes, keepdim=True)
            variance = x.var(axes, correction=0, keepdim=True)
        else:
            mean, variance = node._saved_running_mean, node._saved_running_var
            mean, variance = mean.reshape(shape), variance.reshape(shape)
        return (x - mean) * (variance + node._saved_eps).rsqrt(), shape

    grad_out, x, weight = _again(node, node._saved_grad_out, arrived, normalise)
    return grad_out, x, weight, None, None


def of_cudnn_batch_norm(node: Any, *arrived: Tensor | None) -> Grads:
    """The same by statistics of the batch, for the node that a GPU has."""

    def normalise(x: Tensor) -> tuple[Tensor, list[int]]:
        axes = [0, *range(2, x.dim())]
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        return (x - mean) * (variance + node._saved_epsilon).rsqrt(), [*variance.shape]

    grad_out, x, weight = _again(node, node._saved_grad_output, arrived, normalise)
    return x, grad_out, weight, *(None for _ in node.next_functions[3:])


def _again(node: Any, given_out: Tensor, arrived: Grads, normalise: Normalise) -> Grads:
    """The gradients at the arguments of a normalisation's derivative: gradient, input, gain."""
    # Separate nodes: the gradient depends on the input, too, but that derivative is not needed.
    grad_out, x = (t.view_as(t) for t in (given_out, node._saved_input))
    gain = node._saved_weight
    gain = x.new_ones(()) if gain is None else gain.view_as(gain)
    given = [t if t.requires_grad else t.detach().requires_grad_() for t in (grad_out, x, gain)]
    normal, shape = normalise(given[1])
    shift = torch.zeros_like(given[2], requires_grad=True)
    shaped = [t.reshape(shape) if t.dim() else t for t in (given[2], shift)]
    made = normal * shaped[0] + shaped[1]
    first = torch.autograd.grad(made, [given[1], given[2], shift], given[0], create_graph=True)
    pairs = [(f, a) for f, a in zip(first, arrived, strict=True) if a is not None]
    outputs, vectors = [f for f, _ in pairs], [a for _, a in pairs]
    return torch.autograd.grad(
        outputs, given, vectors, create_graph=True, allow_unused=True, materialize_grads=True
    )
