"""The oracle: dense derivatives by autograd, a backward pass for each entry. Imports torch only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def jacobians(output: Tensor, targets: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Jacobians of one tensor with respect to several, by reverse mode, row by row.

    Args:
        output: A tensor with a graph, of any shape.
        targets: Tensors it depends on.

    Returns:
        For every target, shape ``[*output, *target]``.
    """
    units = torch.eye(output.numel(), dtype=output.dtype).reshape(-1, *output.shape)
    rows = [gradients(output, [*targets.values()], unit) for unit in units] if targets else []
    return {
        key: torch.stack([row[i] for row in rows]).reshape((*output.shape, *target.shape))
        for i, (key, target) in enumerate(targets.items())
    }


def gradients(
    output: Tensor, targets: list[Tensor], cotangent: Tensor | None = None, again: bool = False
) -> tuple[Tensor, ...]:
    """``Jᵀ cotangent`` for every target; zero where there is no path.

    Args:
        output: A tensor with a graph.
        targets: Tensors it may depend on.
        cotangent: Shape of ``output``; may be left out for a scalar.
        again: Whether the result gets a graph, to be differentiated once more.
    """
    options = {"retain_graph": True, "create_graph": again, "allow_unused": True}
    found = torch.autograd.grad(output, targets, cotangent, **options)
    pairs = zip(found, targets, strict=True)
    return tuple(torch.zeros_like(target) if g is None else g for g, target in pairs)


def hessian(value: Tensor, target: Tensor) -> Tensor:
    """Second derivative of a scalar. Shape ``[*target, *target]``."""
    (gradient,) = gradients(value, [target], again=True)
    if not gradient.requires_grad:
        return torch.zeros(*target.shape, *target.shape, dtype=target.dtype)
    return jacobians(gradient, {0: target})[0]


def transposed_product(jacobian: Tensor, mat: Tensor) -> Tensor:
    """``Jᵀ mat``: ``[*out, *in]`` and ``[V, *out]`` to ``[V, *in]``."""
    found: Tensor = torch.tensordot(mat, jacobian, mat.dim() - 1)
    return found


def product(jacobian: Tensor, mat: Tensor) -> Tensor:
    """``J mat``: ``[*out, *in]`` and ``[V, *in]`` to ``[V, *out]``."""
    rank = mat.dim() - 1
    axes = list(range(1, rank + 1)), list(range(jacobian.dim() - rank, jacobian.dim()))
    found: Tensor = torch.tensordot(mat, jacobian, axes)
    return found


def per_sample_product(jacobian: Tensor, mat: Tensor, axis: int = 0) -> Tensor:
    """``J[n]ᵀ mat[v, n]`` for every sample: ``[*out, *θ]`` and ``[V, *out]`` to ``[V, N, *θ]``.

    Args:
        jacobian: The Jacobian with respect to a parameter.
        mat: Columns at the output.
        axis: Which axis of the output holds the samples.
    """
    pairs = zip(jacobian.unbind(axis), mat.unbind(axis + 1), strict=True)
    return torch.stack([transposed_product(j, columns) for j, columns in pairs], 1)


def flat(tensor: Tensor, leading: int) -> Tensor:
    """All axes but the leading ones as one, also where there are no others."""
    return tensor.unsqueeze(leading).flatten(leading)


def own_blocks(jacobian: Tensor, rank: int) -> Tensor:
    """The blocks of each sample with itself: ``[N, *out, N, *in]`` to ``[N, D_out, D_in]``.

    Args:
        jacobian: The Jacobian over the whole batch.
        rank: Number of axes of the output, including the sample axis.
    """
    samples = len(jacobian)
    whole = jacobian.reshape(samples, jacobian.shape[1:rank].numel(), samples, -1)
    return torch.stack([whole[n, :, n] for n in range(samples)])
