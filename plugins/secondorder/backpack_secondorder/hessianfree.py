"""Products with Jacobians and curvature of a whole graph, by plain automatic differentiation.

These functions need no extended modules or rules: double backward is exact for any graph. The graph
is kept until the tensors that hold it are dropped. Inside ``with backpack(...)``, no extension
takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_products.contexts import suspended
from backpack_products.transposition import somewhere
from backpack_secondorder.twice import gradients

Tensors: TypeAlias = Tensor | Sequence[Tensor]


def jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """Multiply with the Jacobian: ``(∂f/∂x) v``, forward mode by double backward.

    Arguments as in :func:`transposed_jacobian_vector_product`, but ``v`` has the shapes of ``x``,
    and the result those of ``f``.
    """
    outputs = _as_tuple(f)
    # The transposed product is linear in these, so its derivative does not depend on their values.
    dummies = tuple(somewhere(y) for y in outputs)
    transposed = transposed_jacobian_vector_product(outputs, x, dummies, retain_graph, detach=False)
    return transposed_jacobian_vector_product(transposed, dummies, v, detach=detach)


def transposed_jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """Multiply with the transposed Jacobian: ``(∂f/∂x)ᵀ v``.

    Args:
        f: Output or outputs, with the graph that leads to ``x``.
        x: Input or inputs.
        v: Vectors of the shapes of ``f``.
        retain_graph: Whether the graph of ``f`` is kept.
        detach: Whether the result is cut off from the graph.

    Returns:
        One tensor of the shape of each input.
    """
    products = _grad(_as_tuple(f), _as_tuple(x), _as_tuple(v), retain_graph)
    return tuple(product.detach() for product in products) if detach else products


def hessian_vector_product(
    f: Tensor,
    params: Tensors,
    v: Tensors,
    grad_params: Sequence[Tensor] | None = None,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """Multiply with the Hessian: ``(∂²f/∂params²) v``.

    Args:
        f: A number, with its graph.
        params: Tensor or tensors.
        v: Vectors of the shapes of ``params``.
        grad_params: The gradient ``∂f/∂params``, if it was computed with ``create_graph=True``
            already; this saves one backward pass.
        detach: Whether the result is cut off from the graph.

    Returns:
        One tensor of the shape of each of ``params``.
    """
    inputs = _as_tuple(params)
    if grad_params is None:
        grad_params = _grad((f,), inputs, None, True)
    # The Hessian is symmetric: the transposed Jacobian of the gradient is the Jacobian.
    return transposed_jacobian_vector_product(tuple(grad_params), inputs, v, detach=detach)


def ggn_vector_product(
    loss: Tensor, output: Tensor, model: Module, v: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Multiply with the generalised Gauss-Newton matrix of a model.

    ``Jᵀ ∇²ℓ J v`` with the Jacobian ``J`` of the output in all trainable parameters.

    Args:
        loss: The loss, with its graph.
        output: The model's output, which the loss was computed from.
        model: The model.
        v: A vector as a list, with the shapes of the trainable parameters.

    Returns:
        The product in the same form.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    return ggn_vector_product_from_plist(loss, output, trainable, v)


def ggn_vector_product_from_plist(
    loss: Tensor,
    output: Tensor,
    plist: Sequence[Tensor | Parameter],
    v: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Multiply with the block of some parameters in the generalised Gauss-Newton matrix.

    Args:
        loss: The loss, with its graph.
        output: The model's output, which the loss was computed from.
        plist: The parameters.
        v: A vector as a list, with the shapes of ``plist``.

    Returns:
        The product in the same form.
    """
    forward = jacobian_vector_product(output, plist, v)
    curved = hessian_vector_product(loss, output, forward)
    return transposed_jacobian_vector_product(output, plist, curved)


def _grad(
    outputs: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    vectors: tuple[Tensor, ...] | None,
    retain_graph: bool,
) -> tuple[Tensor, ...]:
    """``Jᵀ vectors``, zero where an output does not depend on an input."""
    live = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not live:
        return tuple(torch.zeros_like(x) for x in inputs)
    with suspended():
        # Without create_graph, extended modules would free their inputs.
        given = None if vectors is None else [vectors[i] for i in live]
        return tuple(gradients([outputs[i] for i in live], inputs, given, True, retain_graph))


def _as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
