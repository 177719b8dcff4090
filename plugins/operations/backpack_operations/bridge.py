"""Carries columns through single autograd nodes: vector-Jacobian products of operations.

A node's backward formula is linear in the gradient. So one call under vmap, over the columns
``[V, *shape]``, carries all of them. Autograd's engine does two things *around* a node, which are
repeated here: it sums gradients to the shape of a broadcast operand, and casts them to its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from backpack_core._torch import Node
from backpack_core.errors import BridgeError, OverwrittenInputError
from backpack_core.graph import described, is_leaf, refuse
from backpack_core.record.storage import storage
from backpack_operations import nodes
from backpack_operations._torch import CopyNode, metadata_of, vmapped, without_backward
from backpack_operations.fused import fused_product
from backpack_operations.nodes import NodeOutput
from backpack_operations.own_pass import beside_pass
from backpack_products.values import is_symbolic, largest, rounding_unit

Mats = dict[int, Tensor]  # columns [V, *shape], by output number or by position of an operand
Formula: TypeAlias = Callable[..., Mats]


def push(node: Node, mats: Mats, wanted: Collection[int] | None = None) -> Mats:
    """Carry columns from a node's outputs to its operands.

    Args:
        node: An autograd node that autograd has not executed yet.
        mats: Columns ``[V, *shape]`` at the node's outputs, by output number.
        wanted: The positions that are asked for, others may be missing; default: all.

    Returns:
        Columns by position in ``node.next_functions``; those that are zero may be missing.

    Raises:
        BridgeError: The node runs its own backward pass, draws random numbers, or was compiled.
    """
    if is_leaf(node):
        return {}
    if nodes.hands_on(node):
        return mats
    return {
        position: _fit(product, *node.next_functions[position])
        for position, product in push_unsummed(node, mats, wanted).items()
    }


def push_through(
    order: Iterable[Node], starts: Mapping[NodeOutput, Tensor], ends: Container[NodeOutput] = ()
) -> dict[NodeOutput, Tensor]:
    """Carry columns through several nodes.

    Args:
        order: The nodes, consumers first.
        starts: Columns ``[V, *shape]`` at some of their outputs.
        ends: Outputs at which they stop.

    Returns:
        Columns there, at leaves, and at outputs of nodes that are not in the order.
    """
    mats = {**starts}
    for node in order:
        outputs = [(node, output_nr) for output_nr in range(len(node._input_metadata))]
        arrived = {o[1]: mats.pop(o) for o in outputs if o in mats and o not in ends}
        if arrived and is_leaf(node):
            mats[node, 0] = arrived[0]
            continue
        for position, mat in push(node, arrived).items() if arrived else ():
            operand: Any = node.next_functions[position]
            mats[operand] = mats[operand] + mat if operand in mats else mat
    return mats


def push_unsummed(node: Node, mats: Mats, wanted: Collection[int] | None = None) -> Mats:
    """The same as :func:`push`, before results are summed to the shapes of broadcast operands."""
    if nodes.is_compiled(node):
        raise refuse(
            node,
            "it was compiled by torch.compile, and compiled code carries one gradient, once",
            "Run the forward pass inside the block of backpack(...), where compiled code runs "
            "eagerly.",
        )
    columns = [mat.to(metadata_of(node, nr).dtype) for nr, mat in mats.items()]
    formula = _formula(node, list(mats))
    is_single = torch.is_grad_enabled() and nodes.loses_statistics(node)
    with storage().reading(node):  # autograd needs the saved tensors after us
        at_once = fused_product(node, dict(zip(mats, columns, strict=True)), wanted)
        if at_once is not None:
            return at_once
        if is_single and len(columns[0]):
            return _one_by_one(formula, columns)
        if nodes.is_vmap_exact(node):
            return _over_columns(formula, columns)
        # Some formulas assume that a gradient begins where its memory does.
        fresh = [mat.clone(memory_format=torch.contiguous_format) for mat in columns]
        return _checked(formula, fresh)


def call(node: Node, grads: Sequence[Tensor | None]) -> Mats:
    """Call a node on gradients of all its outputs, as autograd does."""
    defined = {nr: gradient for nr, gradient in enumerate(grads) if gradient is not None}
    with storage().reading(node):
        return _formula(node, list(defined))(*defined.values())


def written_at(node: Node) -> tuple[int, ...]:
    """The index of the first entry that a view was overwritten at, in the whole tensor.

    Empty if the operation is no such, or did more than write, or wrote something without a graph.
    """
    metadata, edges = metadata_of(node, 0), node.next_functions
    is_plain = type(node) is CopyNode and not metadata.dtype.is_complex
    if not is_plain or len(edges) < 2 or edges[1][0] is None:
        return ()
    shape = tuple(metadata.shape)

    @torch.no_grad()
    def sent() -> Tensor | None:
        numbers = torch.arange(1, prod(shape) + 1, dtype=metadata.dtype, device=metadata.device)
        return call(node, [numbers.view(shape)]).get(1)

    behind = [child for child, _ in edges if child is not None]
    found = beside_pass(sent, behind, metadata.device)
    if found is None or is_symbolic(found) or not found.numel():
        return ()
    # A factor would show: it makes fractions, zeros, or what is not finite.
    facts = found.flatten()[0], found.amin(), (found - found.round()).abs().amax()
    first, least, rest = torch.stack(facts).tolist()
    if least < 1 or rest != 0:
        return ()
    index, number = list[int](), int(first) - 1
    for length in reversed(shape):
        number, place = divmod(number, length)
        index.append(place)
    return tuple(reversed(index))


def _formula(node: Node, outputs: list[int]) -> Formula:
    """A node as a function of the gradients at some of its outputs; the others are zero."""
    edges = node.next_functions

    def formula(*gradients: Tensor) -> dict[int, Tensor]:
        grads: list[Tensor | None] = [None] * len(node._input_metadata)
        for output_nr, gradient in zip(outputs, gradients, strict=True):
            grads[output_nr] = gradient
        if not nodes.is_function(node):
            result: Any = _called(node, grads)
            sent = result if isinstance(result, tuple) else (result,)
            return {i: g for i, g in enumerate(sent) if g is not None and edges[i][0] is not None}
        # The nodes of Python functions are called by ``apply``, which takes no ``None``.
        with without_backward(lambda: _adds_again(node)):
            result = node.apply(*nodes.filled(node, grads))  # type: ignore[attr-defined]
        return dict(_by_edge(node, result if isinstance(result, tuple) else (result,)))

    return formula


def _called(node: Node, grads: list[Tensor | None]) -> Any:
    """Call a node; raises our error if a tensor that it saved was overwritten."""
    try:
        return node(*grads)  # type: ignore[operator]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise OverwrittenInputError(
            f"What the operation {described(node)} saved was changed in place since, so it has "
            f"no derivative; a plain backward pass would fail, too ({error}). Make a new "
            "tensor (h = h + x instead of h += x), or change it after backward()."
        ) from error


def _by_edge(node: Node, results: tuple[Any, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yields what a Python function's backward returned, by position in ``node.next_functions``.

    It returns one value for each argument, but only tensors that need a gradient have an edge.
    """
    wanted = [i for i, needed in enumerate(node.needs_input_grad) if needed]  # type: ignore[attr-defined]
    edges = [i for i, (parent, _) in enumerate(node.next_functions) if parent is not None]
    if len(edges) not in (0, len(wanted)):  # a view that was made without gradients has no edges
        raise refuse(node, "some of its arguments have no place in the graph")
    for argument, position in zip(wanted, edges, strict=False):
        if argument < len(results) and results[argument] is not None:
            yield position, results[argument]


def _adds_again(node: Node) -> BridgeError:
    """The error for ``backward()`` inside a formula, since each of our calls would add again."""
    return refuse(
        node,
        "it runs a backward pass of its own, which would add to the gradients once more "
        "(for checkpoints, use torch.utils.checkpoint(use_reentrant=False))",
    )


def _over_columns(formula: Formula, mats: list[Tensor]) -> Mats:
    """Call a formula for all columns: by vmap, or by a loop where torch cannot batch it."""
    columns = len(mats[0])
    if columns == 1:
        single = formula(*map(_alone, mats))
        return {i: gradient.unsqueeze(0) for i, gradient in single.items()}
    if columns == 0:
        zeros = formula(*(m.new_zeros(m.shape[1:]) for m in mats))
        return {i: g.new_zeros(0, *g.shape) for i, g in zeros.items()}
    try:
        return vmapped(formula, mats)
    except (BridgeError, CheckpointError):
        raise  # a loop would call a checkpoint again, which recomputes only once
    except RuntimeError:
        # Some formulas, and most Python autograd.Functions, cannot be batched: a loop is exact.
        return _one_by_one(formula, mats)


def _checked(formula: Formula, mats: list[Tensor]) -> Mats:
    """The same as :func:`_over_columns`, checked on a weighted sum of columns.

    Torch's vmap is wrong for some formulas. If the check fails, a loop gives the result.
    """
    if len(mats[0]) < 2 or is_symbolic(mats[0]):
        return _over_columns(formula, mats)
    weights = irregular_weights(mats[0].shape[:1], mats[0].device)
    sums = [_weighted_sum(weights, mat) for mat in mats]
    # The plain call comes first, since a checkpoint cannot recompute under vmap.
    expected = formula(*sums)
    result = _over_columns(formula, mats)
    size = torch.stack([total.abs().sum() for total in sums]).sum()
    if result.keys() == expected.keys() and all(
        agree(weights, product, expected[i], size) for i, product in result.items()
    ):
        return result
    return _one_by_one(formula, mats)


def irregular_weights(shape: torch.Size, device: torch.device) -> Tensor:
    """Different weights between 1/2 and 3/2: multiples of the golden ratio, modulo one.

    They are not random, so that no generator is used, and recorded steps can contain them.
    """
    steps = torch.arange(1, shape.numel() + 1, dtype=torch.float64, device=device)
    return 0.5 + (steps * ((5**0.5 - 1) / 2)).frac().reshape(shape)


def _one_by_one(formula: Formula, mats: list[Tensor]) -> Mats:
    """Call a formula for each column."""
    singles = [formula(*[m[v].clone() for m in mats]) for v in range(len(mats[0]))]
    return {i: torch.stack([single[i] for single in singles]) for i in singles[0]}


def _alone(mat: Tensor) -> Tensor:
    """The only column, ``[1, *] → [*]``, at the beginning of its memory."""
    is_usual = mat.is_contiguous() and not mat.storage_offset()
    return mat[0] if is_usual else mat[0].clone(memory_format=torch.contiguous_format)


def _weighted_sum(weights: Tensor, mat: Tensor) -> Tensor:
    """``Σ_v weights[v] mat[v]``."""
    shape = mat.shape[weights.dim() :]
    flat = mat.reshape(weights.numel(), shape.numel())
    return (weights.flatten().to(mat.dtype) @ flat).reshape(shape)


def agree(weights: Tensor, product: Tensor, expected: Tensor, size: Tensor) -> bool:
    """Whether ``Σ_v weights[v] product[v]`` equals what is expected, up to rounding.

    Args:
        weights: One for each entry of the leading axes, ``[*lead]``.
        product: Shape ``[*lead, *]``.
        expected: Shape ``[*]``.
        size: Sum of the absolute values of the product's inputs, which scales rounding errors.
    """
    if product.shape[weights.dim() :] != expected.shape:
        return False
    if is_symbolic(expected):
        return True
    total = _weighted_sum(weights, product)
    # A wrong result differs by about as much as the largest entry, which rounding never does.
    eps = rounding_unit(total)
    tolerance = eps**0.5 * largest(expected.abs()) + eps * size
    close = (total - expected).abs() <= tolerance
    return bool((close | (total == expected) | (total.isnan() & expected.isnan())).all())


def _fit(product: Tensor, node: Any, output_nr: int) -> Tensor:
    """Sum columns ``[V, *broadcast]`` to ``[V, *shape]`` of an operand, in its dtype."""
    target = metadata_of(node, output_nr)
    if product.shape[1:] == target.shape and product.dtype is target.dtype:
        return product
    shape = (len(product), *target.shape)
    surplus = product.dim() - len(shape)
    if surplus > 0:
        product = product.sum(tuple(range(1, 1 + surplus)))
    axes = tuple(
        axis for axis in range(1, len(shape)) if shape[axis] == 1 and product.shape[axis] != 1
    )
    if axes:
        product = product.sum(axes, keepdim=True)
    if product.is_complex() and not target.dtype.is_complex:
        product = product.real
    return product.to(target.dtype)
