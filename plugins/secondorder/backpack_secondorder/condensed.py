"""Replaces columns by fewer ones in front of a narrow last layer.

A model with ``C`` classes has ``C - 1`` columns at its output. If the last layer (the *head*) has
``D < C`` inputs, the sum of outer products of the columns at these inputs has at most rank ``D``.
So ``D`` columns with the same sum can replace them in the rest of the model. If several entries of
axis 0 belong to one sample (merged tokens, pixels), each has ``D`` columns of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backpack_core import View
from backpack_core.record.call import Call, Edge, site_at
from backpack_products import Columns
from backpack_products.apart import taken_apart
from backpack_products.columns import ApartColumns, Root
from backpack_products.contractions import slices
from backpack_products.parametric import AffineRule
from backpack_products.tuning import memory_budget

# Columns are replaced if D is below this share of C: the factorisation takes about as long as
# carrying all columns through the head.
WORTHWHILE = 0.75


@dataclass(frozen=True, eq=False, repr=False)
class HeadRoot(Root):
    """The root of columns that are still at the output of the head.

    Attributes:
        head: The call of the last layer.
    """

    head: Call | None = None


def at_head(view: View, quantity: Columns) -> Columns | None:
    """Mark columns at a loss with a :class:`HeadRoot` if a narrow head made the loss's input.

    Args:
        view: The call of the loss. It may send to other calls only, not to operations.
        quantity: The columns.

    Returns:
        The columns with that root; ``None`` if replacing columns does not pay.
    """
    edge = _only_edge(view.call)
    site = None if edge is None else site_at(edge)
    if site is None or site.layout is not None or torch.is_grad_enabled():
        return None
    head = site.call
    if not isinstance(head.rule, AffineRule) or head.goes_inside or _only_edge(head) is None:
        return None
    size = head.stored.inputs[0].shape[1:].numel()
    outputs = view.input_shape[1:2].numel()
    for root, count in quantity.sizes.items():
        sets = 1 if root.turns is None else len(root.turns)
        if size > WORTHWHILE * min(count // sets, outputs):
            return None
    return Columns(
        {
            HeadRoot(root.name, root.signs, root.scale, root.turns, head=head): mat
            for root, mat in quantity.blocks.items()
        }
    )


def split_at_head(view: View, quantity: Columns) -> tuple[Columns, Columns]:
    """Split columns into those with the ``HeadRoot`` of this call, and all others."""
    sides: tuple[dict[Root, Tensor], dict[Root, Tensor]] = ({}, {})
    is_plain = bool(view.positions) and not isinstance(quantity, ApartColumns)
    for root, mat in quantity.blocks.items():
        is_at_head = is_plain and isinstance(root, HeadRoot) and root.head is view.call
        sides[not is_at_head][root] = mat
    return Columns(sides[0]), quantity.like(sides[1])


def condensed(columns: Columns) -> Columns:
    """``D`` columns for each root with the same ``Σ_v M[v, n] M[v, n]ᵀ``, ``[D, N, *in]``.

    If samples have several entries of axis 0, the result has ``K`` sets of ``D`` columns each:
    ``[D · K, R, *in]``.

    Args:
        columns: At a tensor with ``D`` numbers ``[*in]`` for each entry of axis 0.
    """
    blocks: dict[Root, Tensor] = {}
    for root, mat in columns.blocks.items():
        if root.turns is None:
            blocks[Root(root.name, scale=root.scale)] = _triangles(mat)
        else:  # each entry is zero in all sets but one
            triangles = _triangles(mat.unflatten(0, (-1, len(root.turns))).sum(1))
            new = Root(root.name, None, root.scale, root.turns)
            blocks[new] = taken_apart(triangles, root.turns).flatten(0, 1)
    return Columns(blocks)


def _triangles(mat: Tensor) -> Tensor:
    """The triangular factors ``R`` of ``M[:, n] = Q R``, ``[V, N, *in] → [min(V, D), N, *in]``.

    Forming ``Mᵀ M`` instead would square the condition number.
    """
    dtype = torch.promote_types(mat.dtype, torch.float32)
    count, samples, *shape = mat.shape
    result = mat.new_empty(min(count, torch.Size(shape).numel()), samples, *shape)
    # The factorisation copies its argument, so it is called for some samples at a time.
    for rows in slices(samples, memory_budget() // max(1, mat[:, :1].nbytes)):
        vectors = mat[:, rows].flatten(2).transpose(0, 1).to(dtype)
        triangles = torch.linalg.qr(vectors, mode="r").R.transpose(0, 1)
        result[:, rows] = triangles.unflatten(2, shape)
    return result


def _only_edge(call: Call) -> Edge | None:
    """The only edge that a call sends something to; ``None`` if it sends to several."""
    edges = [edge for edge in call.edges if edge is not None]
    return edges[0] if len(edges) == 1 else None
