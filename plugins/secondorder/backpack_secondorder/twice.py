"""Gradients that can be differentiated again, even if torch's derivative is wrong or missing.

``docs/checks.md`` says which operations were compared with differences. For wrong ones that nets
use, the gradient is computed by a formula (``formulas_again``) instead of autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from backpack_core.errors import UnsupportedError
from backpack_interplay.checkpoints import unpacking_again
from backpack_operations.nodes import differentiates_once, is_function, shape_of
from backpack_operations.order import behind
from backpack_secondorder._torch import run_engine
from backpack_secondorder.formulas_again import (
    FORMULAS,
    OF_NOTHING,
    Grads,
)

Place: TypeAlias = Tensor | GradientEdge


def gradients(
    outputs: Sequence[Place],
    inputs: Sequence[Place],
    vectors: Sequence[Tensor | None] | None,
    create_graph: bool,
    retain_graph: bool = True,
) -> list[Tensor]:
    """``Σ_k J_kᵀ v_k`` for outputs ``y_k`` and vectors ``v_k``.

    Args:
        outputs: The outputs, or their edges.
        inputs: What they are differentiated in; zeros where they do not depend on it.
        vectors: One of each output's shape; ``None`` for one, at a number, with ``create_graph``.
        create_graph: Whether the result will be differentiated.
        retain_graph: Whether the graph is kept.
    """
    given = vectors and [*map(_by_itself, vectors)]
    if create_graph:
        with _by_formula(outputs):
            grads = torch.autograd.grad(
                outputs,  # type: ignore[arg-type] # tensors and edges may be mixed
                inputs,  # type: ignore[arg-type]
                given,
                create_graph=True,
                retain_graph=retain_graph,
                materialize_grads=True,
            )
        return [*grads]
    found = zip(inputs, run_engine(outputs, inputs, given, retain_graph), strict=True)
    return [torch.zeros_like(cast("Tensor", x)) if g is None else g for x, g in found]


def _by_itself(vector: Tensor | None) -> Tensor | None:
    """The same numbers in the order of memory, from an even place on: pairs may become complex."""
    if vector is None or (vector.is_contiguous() and not vector.storage_offset() % 2):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)


@contextmanager
def _by_formula(outputs: Sequence[Place]) -> Iterator[None]:
    """A block that makes nodes behind some outputs return the results of formulas."""
    nodes = nodes_behind(outputs)
    known = ((node, _formula_of(node)) for node in nodes)
    hooks = [hook for node, formula in known if formula for hook in _replaced(node, formula)]
    hooks += [_watched(node) for node in nodes if is_function(node)]
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


def _formula_of(node: Node) -> Callable[..., Any] | None:
    name = node.name()
    if name in OF_NOTHING and not shape_of(node, 0).numel():
        return OF_NOTHING[name]
    return FORMULAS.get(name)


def _replaced(node: Node, formula: Callable[..., Any]) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks around a node, which then returns the results of its formula.

    A formula may return a function of what the node itself computes.
    """
    sent: list[Any] = []

    def before(arrived: Grads) -> None:
        # A checkpoint returns the node's saved tensors again only while it holds them.
        with unpacking_again(node):
            sent.append(formula(node, *arrived))

    def after(found: Grads, arrived: Grads) -> Grads:
        new = sent.pop()
        pairs = zip(found, new(found) if callable(new) else new, strict=True)
        return tuple(None if old is None else new for old, new in pairs)

    return node.register_prehook(before), node.register_hook(after)


def _watched(node: Node) -> RemovableHandle:
    """A hook that raises if what a Python function returns has no graph: a part would be missing.

    What is linear in gradients that have a graph has one, too, unless it is zero.
    """

    def before(arrived: Grads) -> None:
        raise _without_graph(node)

    def after(found: Grads, arrived: Grads) -> None:
        if any(grad is not None and grad.requires_grad for grad in arrived) and any(
            grad is not None and not grad.requires_grad and grad.any() for grad in found
        ):
            raise _without_graph(node)

    if differentiates_once(node):
        return node.register_prehook(before)
    return node.register_hook(after)


def _without_graph(node: Node) -> UnsupportedError:
    return UnsupportedError(
        f"The backward() of the function {node.name().removesuffix('Backward')!r} returns "
        "gradients without a graph, so products with the Jacobian or the Hessian would miss what "
        "goes through it. Write it in differentiable operations without once_differentiable (a "
        "nested torch.autograd.grad needs create_graph=True), or use an extension that does not "
        "differentiate it again, as DiagGGNExact or KFLR."
    )
