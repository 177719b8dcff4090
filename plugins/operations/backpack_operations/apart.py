"""Pushes columns through nodes behind which tensors have no samples.

A plain sum over samples would lose whose the columns were. So they are kept apart there, ``[V, N,
*]`` at a tensor ``[*]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph.nodes import refuse
from backpack_core.tuning import memory_budget
from backpack_operations import bridge
from backpack_operations.operands import FactoredColumns, by_root, operand_product
from backpack_products.apart import owned_by, put_together, taken_apart
from backpack_products.columns import ApartColumns, Columns, Root
from backpack_products.contractions import slices
from backpack_products.regrouping import of_owners

if TYPE_CHECKING:
    from backpack_operations.alignment import Crossing  # which asks these functions


def cross_apart(
    node: Node, quantities: Mapping[int, Columns], there: Crossing, keeps_all: bool = True
) -> list[tuple[int, Columns]]:
    """Push columns through a node behind which some are kept apart by sample.

    Args:
        node: An autograd node that autograd has not executed yet.
        quantities: Columns at the node's outputs, of the whole batch or of every sample apart.
        there: What is known of the samples at the node.
        keeps_all: Whether to return columns as well that are not kept apart behind the node.

    Returns:
        Pairs (position in ``node.next_functions``, columns there).

    Raises:
        BridgeError: The node cannot be called for columns, or an output has no samples.
    """
    are_apart = any(isinstance(columns, ApartColumns) for columns in quantities.values())
    factored = _factored(node, quantities, there)
    crossed: list[tuple[int, Columns]] = [*factored.items()]
    if keeps_all and not are_apart and there.has_others:
        whole = cross_columns(node, quantities)
        crossed += [
            (position, columns) for position, columns in whole if position not in there.apart
        ]
    if factored.keys() >= there.apart and not (are_apart and there.has_others):
        return crossed
    found: dict[int, dict[Root, Tensor]] = {}
    for root, present in _by_root(quantities):
        for position, product in _push_apart(node, present, root, there).items():
            if position in there.apart - factored.keys():
                found.setdefault(position, {})[root] = product
            elif are_apart and position not in there.apart:
                together = put_together(product, there.behind.get(position, 0))
                if keeps_all:
                    found.setdefault(position, {})[root] = together
    for position, blocks in found.items():
        crossed.append((position, (ApartColumns if position in there.apart else Columns)(blocks)))
    return crossed


def cross_columns(node: Node, quantities: Mapping[int, Columns]) -> list[tuple[int, Columns]]:
    """Push columns of the whole batch through a node, one root after the other.

    Args:
        node: An autograd node that autograd has not executed yet.
        quantities: Columns of the whole batch at the node's outputs, by output number.

    Returns:
        Pairs (position in ``node.next_functions``, columns there).

    Raises:
        BridgeError: The node cannot be called for columns.
    """
    results: dict[int, dict[Root, Tensor]] = {}
    for root, present in _by_root(quantities):
        blocks = {nr: columns.blocks[root] for nr, columns in present.items()}
        for position, product in bridge.push(node, blocks).items():
            results.setdefault(position, {})[root] = product
    return [(position, Columns(blocks)) for position, blocks in results.items()]


def _by_root(quantities: Mapping[int, Columns]) -> Iterator[tuple[Root, dict[int, Columns]]]:
    """Each root, with the columns that have a block of it."""
    for root in dict.fromkeys(root for columns in quantities.values() for root in columns.blocks):
        yield root, {nr: c for nr, c in quantities.items() if root in c.blocks}


def _factored(
    node: Node, quantities: Mapping[int, Columns], there: Crossing
) -> dict[int, FactoredColumns]:
    """The operands, by position, at which columns can stay products in factors."""
    ((number, columns), *others) = quantities.items()
    if others:
        return {}
    if isinstance(columns, FactoredColumns):
        turned = columns.through(node)
        return {} if turned is None else dict.fromkeys(there.apart, turned)
    is_known = isinstance(columns, ApartColumns) or there.positions
    owned = None if is_known else there.owned.get(number)
    if not is_known and owned is None:
        return {}
    found, rows = {}, there.batch_size if owned is None else owned.shape[1]
    for position in there.apart:
        product = operand_product(node, position, columns, rows)
        if product is not None:
            product = product if owned is None else of_owners(product, owned)
            found[position] = FactoredColumns(by_root(product, columns.sizes))
    return found


def _push_apart(
    node: Node, present: Mapping[int, Columns], root: Root, there: Crossing
) -> dict[int, Tensor]:
    """All columns behind a node, ``[V, N, *]`` by position; those that are zero may be missing."""
    owned: Mapping[int, int | Tensor] = {**there.owned, **there.positions}
    of_samples = {i: c for i, c in present.items() if isinstance(c, ApartColumns) or i in owned}
    for nr in present.keys() - of_samples.keys():
        if not of_samples or bool(present[nr].blocks[root].any()):  # else nobody uses the output
            raise refuse(node, "its output has no samples that could be told apart")
    parts: dict[int, list[Tensor]] = {}
    size = max(c.blocks[root].nbytes for c in of_samples.values())  # for each mask
    width = len(next(iter(of_samples.values())).blocks[root])
    few = max(1, memory_budget() // max(1, size))
    for samples in [*slices(there.batch_size, few)] or [slice(0, 0)]:
        mats, count = {}, len(range(there.batch_size)[samples])
        for nr, columns in of_samples.items():
            mat = columns.blocks[root]
            if isinstance(columns, ApartColumns):
                mats[nr] = mat[:, samples].flatten(0, 1)
            else:
                mask = owned_by(owned[nr], mat.shape[1], mat.device)[samples]
                mats[nr] = taken_apart(mat, mask).flatten(0, 1)
        for position, product in bridge.push(node, mats).items():
            parts.setdefault(position, []).append(product.unflatten(0, (width, count)))
    return {position: torch.cat(found, 1) for position, found in parts.items()}
