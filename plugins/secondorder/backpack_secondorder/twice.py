"""Gradients that can be differentiated again, even if torch's derivative is wrong or missing.

``docs/checks.md`` says which operations were compared with differences. For wrong ones that nets
use, this module computes the gradient by a formula instead of autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.functional import softplus
from torch.utils.hooks import RemovableHandle

from backpack_core.errors import UnsupportedError
from backpack_interplay.checkpoints import unpacking_again
from backpack_operations.fused import weight_norm
from backpack_operations.nodes import axes_of, shape_of
from backpack_operations.order import behind
from backpack_secondorder.bags_again import of_bags
from backpack_secondorder.convolution_again import of_convolution
from backpack_secondorder.fused_attention import NAMES, of_fused_attention
from backpack_secondorder.statistics_again import of_batch_norm, of_cudnn_batch_norm, of_layer_norm

Place: TypeAlias = Tensor | GradientEdge
Grads: TypeAlias = tuple[Tensor | None, ...]
Formulas: TypeAlias = dict[str, Callable[..., Grads]]


def gradients(
    outputs: Sequence[Place],
    inputs: Sequence[Place],
    vectors: Sequence[Tensor | None] | None,
    create_graph: bool,
    retain_graph: bool = True,
    in_vectors: bool = False,
) -> list[Tensor]:
    """``Σ_k J_kᵀ v_k`` for outputs ``y_k`` and vectors ``v_k``.

    Args:
        outputs: The outputs, or their edges.
        inputs: What they are differentiated in; zeros where they do not depend on it.
        vectors: One for each output; ``None`` for one, at a number.
        create_graph: Whether the result will be differentiated.
        retain_graph: Whether the graph is kept.
        in_vectors: Whether it will be differentiated only in the vectors, and only once.
    """
    formulas = FORMULAS | OF_VECTORS if in_vectors else FORMULAS
    with _by_formula(outputs, formulas) if create_graph else nullcontext():
        grads = torch.autograd.grad(
            outputs,  # type: ignore[arg-type] # tensors and edges may be mixed
            inputs,  # type: ignore[arg-type]
            vectors and [_by_itself(vector) for vector in vectors],
            create_graph=create_graph,
            retain_graph=retain_graph,
            materialize_grads=True,
        )
    return [*grads]


def _by_itself(vector: Tensor | None) -> Tensor | None:
    """The same numbers in the order of memory, from an even place on: pairs may become complex."""
    if vector is None or (vector.is_contiguous() and not vector.storage_offset() % 2):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)


@contextmanager
def _by_formula(outputs: Sequence[Place], formulas: Formulas) -> Iterator[None]:
    """A block that makes nodes behind some outputs return the results of formulas."""
    nodes = nodes_behind(outputs)
    known = ((node, _formula_of(node, formulas)) for node in nodes)
    hooks = [hook for node, formula in known if formula for hook in _replaced(node, formula)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def nodes_behind(outputs: Sequence[Place]) -> set[Node]:
    """The nodes of outputs, and all behind them.

    Raises:
        UnsupportedError: One of them has a gradient that is not a derivative.
    """
    starts = [o.grad_fn if isinstance(o, Tensor) else o.node for o in outputs]
    nodes = {*behind(starts), *filter(None, starts)}
    if any(getattr(node, "_saved_scale_grad_by_freq", False) for node in nodes):
        raise UnsupportedError(
            "A look-up has scale_grad_by_freq set, which divides gradients by counts over the "
            "whole batch, so they are not derivatives: leave scale_grad_by_freq out."
        )
    return nodes


def _formula_of(node: Node, formulas: Formulas) -> Callable[..., Grads] | None:
    name = node.name()
    if name in OF_NOTHING and not shape_of(node, 0).numel():
        return OF_NOTHING[name]
    return formulas.get(name)


def _replaced(node: Node, formula: Callable[..., Grads]) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks around a node, which then returns the results of its formula."""
    sent: list[Grads] = []

    def before(arrived: Grads) -> None:
        # A checkpoint returns the node's saved tensors again only while it holds them.
        with unpacking_again(node):
            sent.append(formula(node, *arrived))

    def after(found: Grads, arrived: Grads) -> Grads:
        pairs = zip(found, sent.pop(), strict=True)
        return tuple(None if old is None else new for old, new in pairs)

    return node.register_prehook(before), node.register_hook(after)


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
    "LogSigmoidBackward0": _log_sigmoid,
    "LogSoftmaxBackward0": _log_softmax,
    "WeightNormInterfaceBackward0": _weight_norm,
    "NativeLayerNormBackwardBackward0": of_layer_norm,
    "NativeBatchNormBackwardBackward0": of_batch_norm,
    "CudnnBatchNormBackwardBackward0": of_cudnn_batch_norm,
    **dict.fromkeys(NAMES, of_fused_attention),
}
# For outputs without entries, as a batch without samples has.
OF_NOTHING: Formulas = {"EmbeddingBackward0": _of_no_rows}
# Torch's is right, too, but this one is faster.
OF_VECTORS: Formulas = {"ConvolutionBackward0": of_convolution}
