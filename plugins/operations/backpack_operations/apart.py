"""Pushes columns through nodes behind which tensors have no samples.

The gradient at such a tensor ``[*]`` is a sum over the samples. So columns are kept apart there,
``[V, N, *]``: the columns at the output are masked, one sample at a time, and all are pushed. Two
cheaper forms come first: plain columns, where each entry sends to one sample only (``InRuns``), and
products in factors (``FactoredColumns``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import is_leaf, refuse
from backpack_operations import bridge, nodes
from backpack_operations.operands import FactoredColumns, by_root, operand_product
from backpack_operations.runs import run_behind
from backpack_products.apart import owned_by, put_together, taken_apart
from backpack_products.columns import ApartColumns, Columns, InRuns, Root
from backpack_products.contractions import slices
from backpack_products.regrouping import of_owners
from backpack_products.tuning import memory_budget

if TYPE_CHECKING:
    from backpack_operations.alignment import Crossing  # which imports this file


def cross_apart(
    node: Node, quantities: Mapping[int, Columns], there: Crossing, keeps_all: bool = True
) -> list[tuple[int, Columns]]:
    """Push columns through a node, and keep them apart by sample at some operands.

    Args:
        node: An autograd node that autograd has not executed yet.
        quantities: Columns at the node's outputs, of the whole batch or of every sample apart.
        there: Where the samples lie at the node.
        keeps_all: Whether to return also columns that are not kept apart behind the node.

    Returns:
        Pairs (position in ``node.next_functions``, columns there).

    Raises:
        BridgeError: The node cannot be called for columns, or an output has no samples.
    """
    edges = enumerate(node.next_functions)
    others = frozenset(i for i, (child, _) in edges if child and not is_leaf(child)) - there.apart
    are_apart = any(isinstance(columns, ApartColumns) for columns in quantities.values())
    # Columns that are put together again are checked to fit, also if nobody wants them.
    left = there.apart | others if are_apart else there.apart
    wanted = there.apart | others if keeps_all else there.apart
    runs = _runs(node, quantities, there, left)
    crossed: list[tuple[int, Columns]] = []
    if whole := (others - left | runs.keys()) & wanted:
        plain = {nr: c.plain if isinstance(c, InRuns) else c for nr, c in quantities.items()}
        for position, columns in cross_columns(node, plain, whole):
            if position in there.apart & whole:
                crossed.append((position, InRuns(columns, there.batch_size, runs[position])))
            elif position in whole:
                crossed.append((position, columns))
    left -= runs.keys()
    factored = _factored(node, quantities, there, left & there.apart)
    crossed += factored.items()
    masked = _masked(node, quantities, there, left - factored.keys())
    return crossed + [(position, columns) for position, columns in masked if position in wanted]


def _masked(
    node: Node, quantities: Mapping[int, Columns], there: Crossing, left: Collection[int]
) -> list[tuple[int, Columns]]:
    """Columns at some operands, from the columns of each sample at the outputs."""
    crossed: dict[int, dict[Root, Tensor]] = {}
    for root, present in _by_root(quantities) if left else ():
        for position, product in _push_apart(node, present, root, there).items():
            if position in there.apart and position in left:
                crossed.setdefault(position, {})[root] = product
            elif position in left:
                together = put_together(product, there.behind.get(position, 0))
                crossed.setdefault(position, {})[root] = together
    return [
        (position, (ApartColumns if position in there.apart else Columns)(blocks))
        for position, blocks in crossed.items()
    ]


def _runs(
    node: Node, quantities: Mapping[int, Columns], there: Crossing, wanted: Iterable[int]
) -> dict[int, int]:
    """The length of runs (see ``runs.py``) in operands whose entries send to one sample each."""
    samples, lengths = there.batch_size, dict[int, int]()
    if samples < 2:
        return {}
    given = {nr: _run(node, nr, columns, there) for nr, columns in quantities.items()}
    if not all(given.values()):
        return {}
    for position in wanted:
        child, output_nr = node.next_functions[position]
        if child is None:
            continue
        runs = {run_behind(node, nr, position, samples, run) for nr, run in given.items()}
        entries, owned = nodes.shape_of(child, output_nr).numel(), there.behind.get(position, 0)
        run = runs.pop()
        # Where an operand has samples, its runs must be these; else masked columns are checked.
        is_there = isinstance(owned, int) and (not owned or run == entries // samples)
        if run and not runs and (is_there or position in there.apart):
            lengths[position] = run
    return lengths


def _run(node: Node, output_nr: int, columns: Columns, there: Crossing) -> int:
    """The length of runs at an output; zero if that is unknown."""
    if isinstance(columns, InRuns):
        return columns.run
    is_in_order = output_nr in there.positions and not isinstance(columns, ApartColumns)
    return nodes.shape_of(node, output_nr).numel() // there.batch_size if is_in_order else 0


def cross_columns(
    node: Node, quantities: Mapping[int, Columns], wanted: Collection[int] | None = None
) -> list[tuple[int, Columns]]:
    """Push columns of the whole batch through a node; of all roots at once, if outputs share them.

    Args:
        node: An autograd node that autograd has not executed yet.
        quantities: Columns of the whole batch at the node's outputs, by output number.
        wanted: The positions that are asked for, others may be missing; default: all.

    Returns:
        Pairs (position in ``node.next_functions``, columns there).

    Raises:
        BridgeError: The node cannot be called for columns.
    """
    first, *others = quantities.values()
    if first.blocks and all([*c.blocks] == [*first.blocks] for c in others):
        pushed = bridge.push(node, {nr: columns.mat for nr, columns in quantities.items()}, wanted)
        return [(position, first.split(product)) for position, product in pushed.items()]
    results: dict[int, dict[Root, Tensor]] = {}
    for root, present in _by_root(quantities):
        blocks = {nr: columns.blocks[root] for nr, columns in present.items()}
        for position, product in bridge.push(node, blocks, wanted).items():
            results.setdefault(position, {})[root] = product
    return [(position, Columns(blocks)) for position, blocks in results.items()]


def _by_root(quantities: Mapping[int, Columns]) -> Iterator[tuple[Root, dict[int, Columns]]]:
    """Yields each root, with the columns that have a block of it."""
    for root in dict.fromkeys(root for columns in quantities.values() for root in columns.blocks):
        yield root, {nr: c for nr, c in quantities.items() if root in c.blocks}


def _factored(
    node: Node, quantities: Mapping[int, Columns], there: Crossing, wanted: Collection[int]
) -> dict[int, FactoredColumns]:
    """The operands, by position, at which columns can stay products in factors."""
    ((number, columns), *others) = quantities.items()
    if others or not wanted:
        return {}
    if isinstance(columns, FactoredColumns) and (turned := columns.through(node)) is not None:
        return dict.fromkeys(wanted, turned)
    is_in_front = isinstance(columns, InRuns) and columns.is_in_front
    is_known = is_in_front or isinstance(columns, ApartColumns) or there.positions
    owned = None if is_known else there.owned.get(number)
    if not is_known and owned is None:
        return {}
    if isinstance(columns, InRuns) and is_in_front:
        columns = columns.plain
    factored, rows = {}, there.batch_size if owned is None else owned.shape[1]
    for position in wanted:
        product = operand_product(node, position, columns, rows, there.is_table)
        if product is not None:
            product = product if owned is None else of_owners(product, owned)
            factored[position] = FactoredColumns(by_root(product, columns.sizes))
    return factored


def _push_apart(
    node: Node, present: Mapping[int, Columns], root: Root, there: Crossing
) -> dict[int, Tensor]:
    """Columns ``[V, N, *]`` at operands, by position; those that are zero may be missing."""
    owned: Mapping[int, int | Tensor] = {**there.owned, **there.positions}
    of_samples = {i: c for i, c in present.items() if isinstance(c, ApartColumns) or i in owned}
    for nr in present.keys() - of_samples.keys():
        # Zeros come from an output that nobody uses.
        if not of_samples or bool(present[nr].blocks[root].any()):
            raise refuse(node, "its output has no samples that could be told apart")
    parts: dict[int, list[Tensor]] = {}
    size = max(c.blocks[root].nbytes for c in of_samples.values())  # bytes for one sample
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
    return {position: torch.cat(chunks, 1) for position, chunks in parts.items()}
