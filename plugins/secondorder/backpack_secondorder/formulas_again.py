"""Formulas of gradients whose derivative by torch is wrong, imprecise, missing or slow.

Each takes a node and what arrived at its outputs, and returns what goes to its inputs, in
operations that can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softplus

from backpack_operations.fused import weight_norm
from backpack_operations.nodes import axes_of
from backpack_secondorder.bags_again import of_bags
from backpack_secondorder.convolution_again import of_convolution
from backpack_secondorder.fused_attention import NAMES, of_fused_attention
from backpack_secondorder.statistics_again import of_batch_norm, of_cudnn_batch_norm, of_layer_norm

Grads: TypeAlias = tuple[Tensor | None, ...]
Formulas: TypeAlias = dict[str, Callable[..., Any]]


def _weight_norm(node: Any, arrived: Tensor | None, *others: Tensor | None) -> Grads:
    """``w = g v / ‖v‖``, with a norm for each entry of one axis."""
    if arrived is None:
        return None, None
    return tuple([mat.squeeze(0) for mat in weight_norm(node, arrived.unsqueeze(0))])


def _binary_cross_entropy(node: Any, arrived: Tensor | None) -> Grads:
    """``∂ℓ/∂p = (p - t) / (p (1 - p))``, and ``∂ℓ/∂t``; torch's derivative of it adds 1e-12."""
    if arrived is None:
        return None, None
    p, target, weight = node._saved_self, node._saved_target, node._saved_weight
    scale = arrived if weight is None else arrived * weight
    scale = scale / p.numel() if node._saved_reduction == 1 else scale
    logs = [q.log().clamp(min=-100) for q in (1 - p, p)]
    return scale * (p - target) / ((1 - p) * p).clamp(min=1e-12), scale * (logs[0] - logs[1])


def _with_logits(node: Any, arrived: Tensor | None) -> Grads:
    """``ℓ = w ((1 - t) x + (1 + (a - 1) t) log(1 + e⁻ˣ))``, with the slope of :func:`_sigmoid`."""
    if arrived is None:
        return None, None
    x, target, weight = node._saved_self, node._saved_target, node._saved_weight
    positive = node._saved_pos_weight
    scale = arrived if weight is None else arrived * weight
    scale = scale / x.numel() if node._saved_reduction == 1 else scale
    if positive is None:
        return scale * (_sigmoid(x) - target), -scale * x
    slope = (1 + (positive - 1) * target) * _sigmoid(x) - positive * target
    return scale * slope, scale * ((positive - 1) * softplus(-x) - x)


def _log_sigmoid(node: Any, arrived: Tensor | None) -> Grads:
    """``∂/∂x log σ(x) = σ(-x)``, with the slope of :func:`_sigmoid`."""
    return (None if arrived is None else arrived * _sigmoid(-node._saved_self),)


def _sigmoid(x: Tensor) -> Tensor:
    """``σ(x)``, with a derivative in which nothing cancels where ``σ(x)`` is nearly one."""
    return torch.where(x > 0, 1 - (-x).sigmoid(), x.sigmoid())


def _hard_sigmoid(node: Any, arrived: Tensor | None) -> Grads:
    """A sixth of what arrived, where the function is not constant."""
    x = node._saved_self
    return (None if arrived is None else arrived * (x.abs() < 3).to(x.dtype) / 6,)


def _log_softmax(node: Any, arrived: Tensor | None) -> Grads:
    """``g - p Σ g``. A probability near one is one minus the others: its derivative is their sum.

    Torch subtracts numbers that are nearly equal there, and loses what is below rounding.
    """
    if arrived is None:
        return (None,)
    (axis, *_), p = axes_of(node), node._saved_result.exp()
    is_likely = p > 0.5
    others = p.masked_fill(is_likely, 0.0).sum(axis, keepdim=True)
    return (arrived - torch.where(is_likely, 1 - others, p) * arrived.sum(axis, keepdim=True),)


def _of_no_rows(node: Any, arrived: Tensor | None) -> Grads:
    """A table of zeros: torch cannot differentiate the gradient of a look-up of nothing."""
    if arrived is None:
        return (None,)
    features = arrived.shape[-1]
    zeros = arrived.new_zeros(int(node._saved_weight_sym_argsize_0), features)
    return (zeros.index_add(0, node._saved_indices.flatten(), arrived.reshape(0, features)),)


FORMULAS: Formulas = {
    "BinaryCrossEntropyBackward0": _binary_cross_entropy,
    "BinaryCrossEntropyWithLogitsBackward0": _with_logits,
    "EmbeddingBagBackward0": of_bags,
    "HardsigmoidBackward0": _hard_sigmoid,
    "LogSigmoidBackward0": _log_sigmoid,
    "LogSoftmaxBackward0": _log_softmax,
    "WeightNormInterfaceBackward0": _weight_norm,
    "NativeLayerNormBackwardBackward0": of_layer_norm,
    "NativeBatchNormBackwardBackward0": of_batch_norm,
    "CudnnBatchNormBackwardBackward0": of_cudnn_batch_norm,
    **dict.fromkeys(NAMES, of_fused_attention),
    "ConvolutionBackward0": of_convolution,  # torch's is right, too, but slower
}
# For outputs without entries, as a batch without samples has.
OF_NOTHING: Formulas = {"EmbeddingBackward0": _of_no_rows}
