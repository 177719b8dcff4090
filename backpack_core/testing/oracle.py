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
    if not targets:
        return {}
    rows = []
    for basis in torch.eye(output.numel(), dtype=output.dtype).reshape(-1, *output.shape):
        rows.append(gradients(output, list(targets.values()), basis))
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    return {
        key: rows_of.reshape((*output.shape, *target.shape))
        for (key, target), rows_of in zip(targets.items(), stacked, strict=True)
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
    found = torch.autograd.grad(
        output, targets, cotangent, retain_graph=True, create_graph=again, allow_unused=True
    )
    return tuple(
        torch.zeros_like(target) if g is None else g
        for g, target in zip(found, targets, strict=True)
    )


def hessian(value: Tensor, target: Tensor) -> Tensor:
    """Second derivative of a scalar. Shape ``[*target, *target]``."""
    (gradient,) = gradients(value, [target], again=True)
    if not gradient.requires_grad:
        return torch.zeros(*target.shape, *target.shape, dtype=target.dtype)
    return jacobians(gradient, {0: target})[0]


def transposed_product(jacobian: Tensor, mat: Tensor) -> Tensor:
    """``Jᵀ mat``: ``[*out, *in]`` and ``[V, *out]`` to ``[V, *in]``."""
    size = mat[0].numel()
    flat = jacobian.reshape(size, -1)
    return (mat.reshape(len(mat), size) @ flat).reshape(len(mat), *jacobian.shape[mat.dim() - 1 :])


def product(jacobian: Tensor, mat: Tensor) -> Tensor:
    """``J mat``: ``[*out, *in]`` and ``[V, *in]`` to ``[V, *out]``."""
    size = mat[0].numel()
    flat = jacobian.reshape(-1, size)
    out = jacobian.shape[: jacobian.dim() - (mat.dim() - 1)]
    return (mat.reshape(len(mat), size) @ flat.T).reshape(len(mat), *out)


def per_sample_product(jacobian: Tensor, mat: Tensor, axis: int = 0) -> Tensor:
    """``J[n]ᵀ mat[v, n]`` for every sample: ``[*out, *θ]`` and ``[V, *out]`` to ``[V, N, *θ]``.

    Args:
        jacobian: The Jacobian with respect to a parameter.
        mat: Columns at the output.
        axis: Which axis of the output holds the samples.
    """
    rank = mat.dim() - 1
    by_sample = jacobian.movedim(axis, 0)
    columns = mat.movedim(axis + 1, 1).flatten(2) if rank > 1 else mat.unsqueeze(2)
    flat = by_sample.reshape(*columns.shape[1:], -1)
    result = torch.einsum("vno,nop->vnp", columns, flat)
    return result.reshape(*columns.shape[:2], *jacobian.shape[rank:])


def flat(tensor: Tensor, leading: int) -> Tensor:
    """All axes but the leading ones as one, also where there are no others."""
    if tensor.dim() == leading:
        return tensor.unsqueeze(leading)
    return tensor.flatten(leading)
