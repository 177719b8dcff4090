"""Curvature matrices over all parameters: products by differentiating a graph twice."""

from __future__ import annotations

import cmath
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack_core import LayerRule, View
from backpack_core.autocast import without_autocast
from backpack_core.contract.propagator import loss_behind_a_loss
from backpack_core.engine.location import nothing_arrived
from backpack_core.errors import UnsupportedError
from backpack_core.record.call import SITES, Call, Edge
from backpack_core.record.storage import read
from backpack_operations.bridge import agree
from backpack_operations.nodes import is_function
from backpack_operations.order import behind
from backpack_products import HessianLossRule
from backpack_products.contexts import suspended
from backpack_products.contractions import flattened
from backpack_products.transposition import somewhere
from backpack_products.values import is_symbolic
from backpack_secondorder.convolution_again import SENT
from backpack_secondorder.residual import (
    dense_residual,
    diagonal_residual,
    eigen,
    live_inputs,
    modified,
    require_one_input,
    unit_vectors,
)
from backpack_secondorder.torch_errors import explained
from backpack_secondorder.twice import gradients
from backpack_secondorder.whole import LossGraph


@dataclass(frozen=True, eq=False)
class Term:
    """``J_cᵀ R_c J_c``, with the Jacobian ``J_c`` of a tensor ``c`` in the parameters.

    Attributes:
        edge: The gradient edge of the tensor.
        like: A tensor of its shape and dtype, ``[N, *]``.
        multiply: ``R_c``, a function ``[N, *] → [N, *]``.
    """

    edge: GradientEdge
    like: Tensor
    multiply: Callable[[Tensor], Tensor]


# Whether vmap was right for a graph, by the types of its operations.
_agreed: dict[frozenset[type], bool] = {}


class Operator(ABC):
    """A symmetric matrix over all parameters of a pass.

    Attributes:
        used: The ids of parameters that layers are known to use.
    """

    def __init__(self, graph: LossGraph) -> None:
        """Keep the graph."""
        self._graph = graph
        self._places = {id(p): i for i, p in enumerate(graph.parameters)}
        self._is_differentiable = torch.is_grad_enabled()  # with create_graph=True

    def multiply(self, parameter: Tensor, vectors: Tensor) -> Tensor:
        """Vectors ``[V, *θ]`` times the block of a parameter."""
        with suspended(), without_autocast(), explained():
            products = [self._one(parameter, vector) for vector in vectors]
        result = torch.stack(products) if products else torch.zeros_like(vectors)
        return result if self._is_differentiable else result.detach()

    @abstractmethod
    def _one(self, parameter: Tensor, vector: Tensor) -> Tensor:
        """A vector ``[*θ]`` times the block."""

    def _place(self, parameter: Tensor) -> int:
        return self._places[id(parameter)]

    def __repr__(self) -> str:
        """Kind and number of parameters."""
        return f"<{type(self).__name__} over {len(self._places)} parameters>"


class HessianOperator(Operator):
    """The Hessian of the tensors that ``backward()`` was called on."""

    def __init__(self, graph: LossGraph, chosen: Sequence[View] | None = None) -> None:
        """Keep the graph.

        Args:
            graph: The graph.
            chosen: Losses, with the samples that take part; ``None`` for all.
        """
        super().__init__(graph)
        self._chosen = None if chosen is None else [view for view in chosen if live_inputs(view)]

    @cached_property
    def _gradients(self) -> Sequence[Tensor]:
        """Gradients of the loss in all parameters, with a graph."""
        roots, arriving = self._graph.roots, self._graph.gradients
        if self._chosen is not None:
            losses = tuple(map(_edge_of_loss, self._chosen))
            sent = gradients(roots, losses, arriving, True)
            roots = tuple(map(edge_at_input, self._chosen))
            # One loss at a time: two losses may send gradients to the same tensor.
            own = [
                gradients((loss,), (root,), (gradient,), True)[0]
                for loss, root, gradient in zip(losses, roots, sent, strict=True)
            ]
            with torch.enable_grad():  # the caller may have switched it off
                arriving = tuple(map(_of_samples, self._chosen, own))
        return gradients(roots, self._graph.parameters, arriving, True)

    def _one(self, parameter: Tensor, vector: Tensor) -> Tensor:
        gradient = self._gradients[self._place(parameter)]
        if gradient.grad_fn is None:
            return torch.zeros_like(vector)  # the gradient is a constant there
        return gradients((gradient,), (parameter,), (vector,), self._is_differentiable)[0]

    def diagonal(self, parameter: Tensor, chunk_size: int) -> Tensor:
        """The diagonal of the block of a parameter, ``[*θ]``.

        Args:
            parameter: ``θ``.
            chunk_size: How many unit vectors are multiplied at a time.
        """
        single = parameter.detach().unsqueeze(0)
        parts = []
        for start in range(0, parameter.numel(), chunk_size):
            some = slice(start, start + chunk_size)
            product = self._several(parameter, unit_vectors(single, some).squeeze(1))
            parts.append(product.reshape(len(product), -1).diagonal(start))
        if not parts:
            return torch.zeros_like(single[0])
        entries = torch.cat(parts).reshape(parameter.shape)
        return entries if self._is_differentiable else entries.detach()

    def _several(self, parameter: Tensor, vectors: Tensor) -> Tensor:
        """Multiply several vectors at once by vmap; a random combination is checked separately.

        The check makes the host wait for its result. So it takes place in measured passes, and for
        the first graph with operations of these types. Python functions are always checked.
        """
        is_known = not self._graph.is_measured and self._kinds and self._kinds in _agreed
        is_wrong = is_known and not _agreed[self._kinds]
        if is_wrong or self._is_differentiable or len(vectors) < 3 or is_symbolic(vectors):
            return self.multiply(parameter, vectors)
        generator = torch.Generator(vectors.device).manual_seed(0)
        weights = 0.5 + torch.rand(
            len(vectors), generator=generator, dtype=vectors.dtype, device=vectors.device
        )
        total = torch.einsum("v,v...->...", weights, vectors)
        try:
            with suspended(), without_autocast():
                gradient = self._gradients[self._place(parameter)]
                if not gradient.requires_grad:
                    return torch.zeros_like(vectors)
                (products,) = torch.autograd.grad(
                    (gradient,), (parameter,), (vectors,), retain_graph=True, is_grads_batched=True
                )
        except RuntimeError:  # one by one, the error is explained
            return self.multiply(parameter, vectors)
        if is_known:
            return products
        expected = self.multiply(parameter, total.unsqueeze(0)).squeeze(0)
        _agreed[self._kinds] = agree(weights, products, expected, products.abs().sum())
        return products if _agreed[self._kinds] else self.multiply(parameter, vectors)

    @cached_property
    def _kinds(self) -> frozenset[type]:
        """The types of the operations behind the gradients; none if any is a Python function."""
        with suspended(), without_autocast():  # they may be computed in this call
            gradients = self._gradients
        roots = [gradient.grad_fn for gradient in gradients if gradient.grad_fn is not None]
        nodes = behind(roots).union(roots)
        kinds = frozenset(map(type, nodes))
        is_of_users = any(is_function(node) and type(node) is not SENT for node in nodes)
        return frozenset() if is_of_users else kinds


class CurvatureOperator(Operator):
    """``Σ_c J_cᵀ R_c J_c``."""

    def __init__(self, graph: LossGraph, terms: Sequence[Term]) -> None:
        """Keep graph and terms."""
        super().__init__(graph)
        self._terms = terms
        self._edges = tuple(term.edge for term in terms)

    @cached_property
    def _transposed(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Dummies ``u_c`` at every term, and ``Σ_c J_cᵀ u_c`` as a function of them."""
        dummies = [somewhere(term.like) for term in self._terms]
        return dummies, gradients(self._edges, self._graph.parameters, dummies, True)

    def _one(self, parameter: Tensor, vector: Tensor) -> Tensor:
        if not self._terms:
            return torch.zeros_like(vector)
        dummies, images = self._transposed
        image = images[self._place(parameter)]
        if image.grad_fn is None and all(image is not dummy for dummy in dummies):
            return torch.zeros_like(vector)  # the gradient is a constant there
        # The transposed product is linear in the dummies: its derivative is the product.
        forward = gradients((image,), dummies, (vector,), self._is_differentiable)
        if not all(map(is_finite, forward)) and is_finite(vector):
            raise UnsupportedError(
                "The Jacobian of the net times a finite vector is not finite. An operation has no "
                "finite second derivative in torch where it was evaluated (a power or a root of "
                "zero, LPPool of zeros), or the net has none. Keep its input away from there, or "
                "use DiagGGNExact or a Kronecker factorisation, which need only first derivatives."
            )
        with torch.set_grad_enabled(self._is_differentiable):
            curved = [term.multiply(t) for term, t in zip(self._terms, forward, strict=True)]
        return gradients(self._edges, (parameter,), curved, self._is_differentiable)[0]


def is_finite(mat: Tensor) -> bool:
    """Whether all numbers are finite; true for tensors without values (fake ones)."""
    # A sum is faster to check, and finite only if all numbers are.
    return is_symbolic(mat) or cmath.isfinite(mat.sum().item()) or bool(mat.isfinite().all())


def loss_terms(view: View) -> list[Term]:
    """The term of a loss: its Hessian at its input. Empty if no parameter leads to the input."""
    if not live_inputs(view):
        return []
    rule, whole = view.call.rule, view.full

    def multiply(x: Tensor) -> Tensor:
        for slot in range(len(whole.inputs)):  # the view may have read them in the pass
            read(whole, slot, "input or target")
        product: Tensor = rule.hessian_mat_prod(view, x.unsqueeze(0)).squeeze(0)
        return product

    return [_term(view, multiply)]


def positive_term(rule: LayerRule, view: View, modify: Literal["clip", "abs"]) -> list[Term]:
    """The residual of a call, made positive semi-definite; for a loss, its Hessian."""
    if not live_inputs(view):
        return []
    if isinstance(rule, HessianLossRule):
        if rule.hessian_is_psd:
            return loss_terms(view)
        rows: Any = _rows_of_loss(view)
    else:
        require_one_input(rule, view)
        diagonal = diagonal_residual(rule, view)
        if diagonal is not None:
            positive = modified(diagonal, modify)
            return [_term(view, lambda x: x * positive)]
        rows = dense_residual(rule, view)(slice(None))
    values, vectors = eigen(rows, view.is_measured)
    weighted = vectors * modified(values, modify).unsqueeze(1)

    def multiply(x: Tensor) -> Tensor:
        return (weighted @ (vectors.mT @ flattened(x, 1).unsqueeze(2))).reshape(x.shape)

    return [_term(view, multiply)]


def require_losses(losses: Sequence[View], others: Sequence[View], who: str) -> None:
    """Check that all gradients come from extended losses that do not depend on each other.

    Args:
        losses: The losses with a known Hessian.
        others: All other calls that a gradient reached, in that order.
        who: The extension, for the message.

    Raises:
        BackpackError: A part of the loss does not come from an extended loss.
    """
    reached = behind(view.node for view in losses)
    for view in others:
        if view.node not in reached:
            raise nothing_arrived(view, who)
    for view in losses:
        if view.node in reached:
            raise loss_behind_a_loss(view)


def _rows_of_loss(view: View) -> Tensor:
    size = view.input_shape[1:].numel()
    eye = torch.eye(size, dtype=view.dtype, device=view.device)
    columns = eye.reshape(size, 1, *view.input_shape[1:]).expand(-1, *view.input_shape)
    rows: Tensor = view.call.rule.hessian_mat_prod(view, columns)
    return rows


def _term(view: View, multiply: Callable[[Tensor], Tensor]) -> Term:
    """A term at the only input of a call that depends on parameters, for a view's samples."""
    position = (live_inputs(view) or [0])[0]
    like = view.stored.inputs[position]

    def of_samples(x: Tensor) -> Tensor:
        x, dtype = x.to(view.dtype), x.dtype
        if view.indices is None:
            return multiply(x).to(dtype)
        chosen = torch.tensor(view.indices, device=x.device, dtype=torch.long)
        return torch.zeros_like(x).index_add(0, chosen, multiply(x[chosen])).to(dtype)

    return Term(edge_at_input(view), like.detach(), of_samples)


def edge_at_input(view: View) -> GradientEdge:
    """The gradient edge of the input that a call must send a quantity to."""
    edge = view.call.edges[(live_inputs(view) or [0])[0]]
    assert edge is not None
    return GradientEdge(edge.node, edge.output_nr)


def _edge_of_loss(view: View) -> GradientEdge:
    assert view.node is not None
    edge = _edge_at(view.call, view.index, view.node)
    if edge is None:
        raise UnsupportedError(
            f"The output of {view.path} was changed in place afterwards, so the gradient of single "
            "samples is not known there. Use an out-of-place operation."
        )
    return GradientEdge(edge.node, edge.output_nr)


def _edge_at(call: Call, index: int, node: Node) -> Edge | None:
    """The edge of a call's output at a node; ``None`` if the output belongs to another node."""
    table: Any = node.metadata.get(SITES, {})  # type: ignore[attr-defined]
    places = (nr for nr, found in table.items() if found == (call, index))
    return next((Edge(node, nr) for nr in places), None)


def _of_samples(view: View, gradient: Tensor) -> Tensor:
    """The gradient at the input of a loss, for the samples that take part."""
    assert view.indices is not None
    counts = torch.bincount(torch.tensor(view.indices), minlength=len(gradient))
    weights = counts.to(gradient.dtype).to(gradient.device)
    return gradient * weights.reshape(-1, *[1] * (gradient.dim() - 1))
