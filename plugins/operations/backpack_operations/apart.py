"""Pushes columns through nodes behind which tensors have no samples.

A plain sum over samples would lose whose the columns were. So they are kept apart there, ``[V, N,
*]`` at a tensor ``[*]``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph.nodes import is_leaf, refuse
from backpack_core.tuning import memory_budget
from backpack_operations import bridge, nodes
from backpack_operations.operands import FactoredColumns, by_root, operand_product
from backpack_operations.runs import run_behind
from backpack_products.apart import owned_by, put_together, taken_apart
from backpack_products.columns import ApartColumns, Columns, InRuns, Root
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
    ways = enumerate(node.next_functions)
    others = frozenset(i for i, (child, _) in ways if child and not is_leaf(child)) - there.apart
    are_apart = any(isinstance(columns, ApartColumns) for columns in quantities.values())
    # Where samples end to be apart they are seen to fit, also if nobody wants the columns.
    left = there.apart | others if are_apart else there.apart
    wanted = there.apart | others if keeps_all else there.apart
    runs = _runs(node, quantities, there, left)
    crossed: list[tuple[int, Columns]] = []
    if whole := (others - left | runs.keys()) & wanted:
        plain = {nr: c.plain if isinstance(c, InRuns) else c for nr, c in quantities.items()}
        for position, columns in cross_columns(node, plain):
            if position in there.apart & whole:
                crossed.append((position, InRuns(columns, there.batch_size, runs[position])))
            elif position in whole:
                crossed.append((position, columns))
    left -= runs.keys()
    factored = _factored(node, quantities, there, left & there.apart)
    crossed += factored.items()
    formed = _formed(node, quantities, there, left - factored.keys())
    return crossed + [(position, columns) for position, columns in formed if position in wanted]


def _formed(
    node: Node, quantities: Mapping[int, Columns], there: Crossing, left: Collection[int]
) -> list[tuple[int, Columns]]:
    """Columns at some operands, from those of each sample at the outputs."""
    found: dict[int, dict[Root, Tensor]] = {}
    for root, present in _by_root(quantities) if left else ():
        for position, product in _push_apart(node, present, root, there).items():
            if position in there.apart and position in left:
                found.setdefault(position, {})[root] = product
            elif position in left:
                together = put_together(product, there.behind.get(position, 0))
                found.setdefault(position, {})[root] = together
    return [
        (position, (ApartColumns if position in there.apart else Columns)(blocks))
        for position, blocks in found.items()
    ]


def _runs(
    node: Node, quantities: Mapping[int, Columns], there: Crossing, wanted: Iterable[int]
) -> dict[int, int]:
    """The length of runs in operands of which each entry sends something to one sample only."""
    samples, found = there.batch_size, dict[int, int]()
    if samples < 2:
        return {}
    given = {nr: _run(node, nr, columns, there) for nr, columns in quantities.items()}
    if not all(given.values()):
        return {}
    for position in wanted:
        child, number = node.next_functions[position]
        if child is None:
            continue
        runs = {run_behind(node, nr, position, samples, run) for nr, run in given.items()}
        entries, owned = nodes.shape_of(child, number).numel(), there.behind.get(position, 0)
        run = runs.pop()
        # Where the next samples are, they have to be these; else it is seen to fit.
        is_there = isinstance(owned, int) and (not owned or run == entries // samples)
        if run and not runs and (is_there or position in there.apart):
            found[position] = run
    return found


def _run(node: Node, number: int, columns: Columns, there: Crossing) -> int:
    """The length of runs at an output; zero if that is unknown."""
    if isinstance(columns, InRuns):
        return columns.run
    is_in_order = number in there.positions and not isinstance(columns, ApartColumns)
    return nodes.shape_of(node, number).numel() // there.batch_size if is_in_order else 0


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
    node: Node, quantities: Mapping[int, Columns], there: Crossing, wanted: Collection[int]
) -> dict[int, FactoredColumns]:
    """The operands, by position, at which columns can stay products in factors."""
    ((number, columns), *others) = quantities.items()
    if others or not wanted:
        return {}
    if isinstance(columns, FactoredColumns):
        turned = columns.through(node)
        return {} if turned is None else dict.fromkeys(wanted, turned)
    is_in_front = isinstance(columns, InRuns) and columns.is_in_front
    is_known = is_in_front or isinstance(columns, ApartColumns) or there.positions
    owned = None if is_known else there.owned.get(number)
    if not is_known and owned is None:
        return {}
    if isinstance(columns, InRuns) and is_in_front:
        columns = columns.plain
    found, rows = {}, there.batch_size if owned is None else owned.shape[1]
    for position in wanted:
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
