"""The parameters that results are stored on, and columns at those that others are computed from.

A parametrization computes some parameters, or a hook before the forward. That computation depends
on no sample, so columns of any number of samples go through its nodes side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from backpack_core._torch import Node, will_execute, will_get_gradient
from backpack_core.errors import UnsupportedError
from backpack_core.graph import nodes
from backpack_core.graph.order import ranks
from backpack_core.record.call import Call, Edge, edge_of
from backpack_operations import bridge

T = TypeVar("T")


class Trained(NamedTuple):
    """A parameter that is read at a call.

    Attributes:
        name: Its name in the module.
        parameter: What the result is stored on.
        used: The tensor that the module used: the parameter, or what was computed from it.
    """

    name: str
    parameter: Tensor
    used: Tensor


def trained_in(call: Call) -> tuple[tuple[Trained, ...], tuple[Trained, ...]]:
    """The parameters that a call reads off, and those that its rule does not cover."""
    stored, covers = call.stored, call.rule.covers
    covered: list[Trained] = []
    others: list[Trained] = []
    for name in stored.parameters:
        tensor, _ = stored.owned[name]
        if tensor.requires_grad and name not in stored.frozen:
            found = covered if covers(call.module, name) else others
            for parameter in stored.computed.get(name, (tensor,)):
                # Much faster than Trained(...).
                found.append(tuple.__new__(Trained, (name, parameter, tensor)))
    return tuple(covered), tuple(others)


def complex_parameter(name: str) -> UnsupportedError:
    """The error for a trained parameter of complex numbers."""
    return UnsupportedError(
        f"The parameter {name} is complex, and quantities are defined for real parameters "
        "only: train its real and its imaginary part as two parameters, or freeze it."
    )


def leaves_behind(tensor: Tensor) -> tuple[Tensor, ...]:
    """The leaves with a gradient that a tensor was computed from."""
    edge = edge_of(tensor)
    if edge is None:
        return (tensor,) if tensor.requires_grad else ()
    return tuple(n.variable for n in ranks(edge.node) if nodes.is_leaf(n))  # type: ignore[attr-defined]


def pull_back(mat: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
    """Columns at a leaf, from columns at a tensor that was computed from it.

    Args:
        mat: Shape ``[K, *source]``.
        source: The tensor.
        leaf: One of :func:`leaves_behind` it.

    Returns:
        Shape ``[K, *leaf]``.

    Raises:
        BridgeError: An operation on the way cannot be called for columns.
    """
    edge = edge_of(source)
    if edge is None:
        return mat
    if will_get_gradient(leaf):
        return _pulled(mat, edge, leaf)
    return _in_own_pass(partial(_pulled, mat, edge, leaf), mat.device)


def beside_pass(function: Callable[[], T], called: Iterable[Node], device: torch.device) -> T:
    """Call a function that calls nodes which the current backward pass may leave out."""
    return function() if all(map(will_execute, called)) else _in_own_pass(function, device)


def _in_own_pass(function: Callable[[], T], device: torch.device) -> T:
    """Call a function inside of a backward pass of its own.

    In a pass with ``inputs=...``, nodes leave out what autograd does not need, whoever calls them.
    """
    found: list[T] = []
    is_differentiable = torch.is_grad_enabled()

    def call(_: Tensor) -> None:
        with torch.set_grad_enabled(is_differentiable):
            found.append(function())

    with torch.enable_grad():
        root = torch.zeros((), device=device, requires_grad=True).clone()
    root.register_hook(call)
    root.backward()  # a pass without inputs=
    return found[0]


def nonlinear_between(source: Tensor, leaf: Tensor) -> list[Node]:
    """The operations by which a tensor is computed from a leaf that are not known to be linear."""
    edge = edge_of(source)
    between = [*ranks(edge.node)] if edge is not None else []
    leads = {n for n in between if nodes.is_leaf(n) and n.variable is leaf}  # type: ignore[attr-defined]
    for node in reversed(between):  # operands first
        if any(child in leads for child, _ in node.next_functions):
            leads.add(node)
    on_the_way = (node for node in between if node in leads and not nodes.is_leaf(node))
    return [node for node in on_the_way if not nodes.is_linear(node, leads)]


def _pulled(mat: Tensor, edge: Edge, leaf: Tensor) -> Tensor:
    """Columns at a leaf, pushed from node to node."""
    found = bridge.push_through(ranks(edge.node), {(edge.node, edge.output_nr): mat})
    at_leaf = (m for (node, _), m in found.items() if node.variable is leaf)  # type: ignore[attr-defined]
    return next(at_leaf, mat.new_zeros(len(mat), *leaf.shape))
