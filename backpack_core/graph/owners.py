"""Tells which sample each entry belongs to, after an operation has picked some of them.

As ``logits[mask]`` picks tokens: a sample then has any number of entries, in an order that only the
saved index knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node, metadata_of
from backpack_core.graph import nodes
from backpack_core.graph.batch import declared_axis, is_doubtful
from backpack_core.graph.bridge import push
from backpack_core.graph.of_weights import Origins
from backpack_core.graph.parameters import beside_pass
from backpack_core.graph.paths import entries_of
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Call, Edge

Test = Callable[[Node], bool]


class Owners(NamedTuple):
    """Which sample each entry of axis 0 was picked from.

    Attributes:
        rows: The number of the sample, one for each entry.
        are_sure: Whether an index says so; else entries may have been picked from another axis.
    """

    rows: Tensor
    are_sure: bool

    def fit(self, rows: int) -> bool:
        """Whether views may have merged more into as many rows."""
        return not rows % len(self.rows)

    def spread(self, rows: int) -> Owners:
        """Those of so many rows, into which views have merged more."""
        return Owners(self.rows.repeat_interleave(rows // len(self.rows)), self.are_sure)


def owners_of_rows(node: Node | None, survey: Survey, number: int, is_table: Test) -> Owners | None:
    """Which sample each entry of axis 0 belongs to; ``None`` if that is unknown.

    The tensor that entries were picked from has its samples one after the other on axis 0, each
    with one entry or several. Operations behind have kept the rows, or the entries are of one
    sample.

    Args:
        node: The node of the tensor.
        survey: What is known about the graph.
        number: Which output of the node it is.
        is_table: Tells whether the tensor of a node has no samples.
    """
    rows = 0 if node is None else nodes.shape_of(node, number)[:1].numel()
    is_kept = True
    while node is not None and node not in survey.rows:
        edges = [(i, e) for i, e in edges_behind(node) if not _is_table(e.node, is_table)]
        kept = [e for i, e in edges if nodes.keeps_rows(node, number, i)]
        if not kept and (len(edges) != 1 or nodes.operation_of(node) in nodes.PICKS):
            break
        is_kept &= bool(kept)
        edge = kept[0] if kept else edges[0][1]
        merged = _of_merged(survey, edge, rows) if is_kept else None
        if merged is not None:
            return merged
        node, number = edge.node, edge.output_nr
    if node is None or (node not in survey.rows and nodes.operation_of(node) not in nodes.PICKS):
        return None
    found = _of_picked(node, survey, number, is_table, False)
    if found is not None and not is_kept and len(found.rows.unique()) == 1:
        return Owners(found.rows[:1].expand(rows), False)
    return found.spread(rows) if found is not None and is_kept and found.fit(rows) else None


def owners_behind_loss(
    node: Node | None, survey: Survey, number: int, is_table: Test
) -> Owners | None:
    """Which sample each entry belongs to that an extended loss received; ``None`` if unknown.

    Its terms are those of its rows. These may be all rows, in another order, or merged.
    """
    samples = survey.batch_size
    rows = 0 if node is None else nodes.shape_of(node, number)[:1].numel()
    todo = [] if node is None else [(node, number)]
    while todo:
        this, number = todo.pop()
        operation = nodes.operation_of(this)
        is_picked = operation in nodes.PICKS and not nodes.keeps_rows(this, number, 0)
        if this in survey.rows or is_picked or operation in ("Index", "IndexSelect"):
            found = _of_picked(this, survey, number, is_table, True)
            if found is not None and found.fit(rows):
                return found.spread(rows)
            continue
        for position, edge in edges_behind(this):
            child, behind, _ = edge
            shape = nodes.shape_of(child, behind)
            if is_table(child) or not nodes.keeps_rows(this, number, position):
                continue
            merged = _of_merged(survey, edge, rows)
            if merged is not None:
                return merged
            if rows > samples and shape[:1] == (samples,):
                own = torch.arange(samples).repeat_interleave(rows // samples)
                is_known = not is_doubtful(shape, samples) or _is_first(survey, child, behind)
                return Owners(own, True) if is_known else None
            todo.append((child, behind))
    return None


def turns_of(survey: Survey, loss: Call) -> Tensor:
    """A number for each row that a loss received; the rows of one sample have different numbers.

    Rows with one number share a column, as no two of them belong to one sample.
    """
    edge, rows = loss.edges[0], torch.arange(loss.stored.inputs[0].shape[0])
    node = edge.node if edge is not None and survey.is_readable else None
    number = 0 if edge is None else edge.output_nr
    found = owners_behind_loss(node, survey, number, Origins(survey).of_weights)
    if found is None:
        return rows % entries_of(survey, loss)
    owners = found.rows
    order, counts = owners.argsort(stable=True), owners.bincount()
    turns = torch.empty_like(owners)
    turns[order] = rows.to(owners.device) - (counts.cumsum(0) - counts)[owners[order]]
    return turns


def _of_merged(survey: Survey, edge: Edge, rows: int) -> Owners | None:
    """Whose the rows are that a view merges axes into, one of which is declared as the samples'."""
    if not survey.is_declared:
        return None
    samples, shape = survey.batch_size, nodes.shape_of(edge.node, edge.output_nr)
    merged = next((shape[:k] for k in range(2, 1 + len(shape)) if shape[:k].numel() == rows), ())
    axes = [axis for axis, length in enumerate(merged) if length == samples]
    if len(axes) > 1:  # as many steps
        site = survey.site_at(edge)
        axes = [axis for axis in axes if site is not None and axis == declared_axis(site.call)]
    if not axes:
        return None
    own = torch.arange(samples).reshape(-1, *[1] * (len(merged) - 1 - axes[0]))
    return Owners(own.expand(merged).flatten(), True)


def _of_picked(
    node: Node, survey: Survey, number: int, is_table: Test, of_loss: bool
) -> Owners | None:
    """Whose the entries are that an operation has picked, as they come; or who picked data did."""
    if node in survey.rows:
        return Owners(survey.rows[node], True)
    samples, (child, behind) = survey.batch_size, node.next_functions[0]
    if child is None or _is_table(node, is_table) or not samples:
        return None
    length, *others = nodes.lengths_of(child, behind) or (0,)
    if of_loss and samples > 1 and samples in others and not _is_first(survey, child, behind):
        return None  # another axis that is as long may be that of the samples
    picked = _picked(node, number) if length else None
    if picked is None or not len(picked):
        return None
    picked, (count, rest) = picked % length, divmod(length, samples)
    find = owners_behind_loss if of_loss else owners_of_rows
    before = None if length == samples else find(child, survey, behind, is_table)
    are_sure = of_loss or nodes.operation_of(node) in nodes.GATHERS
    if before is not None and (rest or before.are_sure):
        return Owners(before.rows.to(picked.device)[picked], are_sure and before.are_sure)
    # A permutation of all may pair them with targets of other samples; a loss has its own targets.
    is_turned = not of_loss and len(picked) == length == len(picked.unique())
    return None if rest or is_turned else Owners(picked // count, are_sure)


def _is_first(survey: Survey, node: Node, number: int) -> bool:
    """Whether a module returned the rows of a tensor, with its samples first."""
    edge: Edge | None = Edge(node, number)
    while edge is not None:
        site = survey.site_at(edge)
        if site is not None and site.call not in survey.opened:
            place = (site.call, site.index)
            is_usual = not (survey.axes[place] or declared_axis(site.call))
            return is_usual and survey.received.get(place) == survey.batch_size
        node, number, _ = edge
        edge = next((e for i, e in edges_behind(node) if nodes.keeps_rows(node, number, i)), None)
    return False


def _is_table(node: Node, is_table: Test) -> bool:
    """Whether a tensor has no samples, or was picked from one without any, as a parameter."""
    if nodes.operation_of(node) in nodes.PICKS:
        child, _ = node.next_functions[0]
        return child is not None and _is_table(child, is_table)
    return nodes.is_leaf(node) or is_table(node)


def _picked(node: Node, number: int) -> Tensor | None:
    """The entries of axis 0 that an operation picked; ``None`` if it may have kept them all."""
    saved: Any = node
    operation, shape = nodes.operation_of(node), nodes.shape_of(node, number)
    if operation == "Index":
        indices: list[Tensor] = []
        for given in saved._saved_indices:
            if given is None:  # an axis that is kept
                break
            indices += given.nonzero(as_tuple=True) if given.dtype == torch.bool else [given]
        picked = torch.broadcast_tensors(*indices)[0] if indices else None
        return picked if picked is not None and picked.shape == shape[:1] else None
    if operation == "IndexSelect":
        index: Tensor = saved._saved_index
        return None if saved._saved_dim else index
    ones = torch.ones(1, *shape, device=metadata_of(node, number).device)
    behind = [child for child, _ in node.next_functions if child is not None]
    (sent,) = beside_pass(partial(push, node, {number: ones}), behind, ones.device).values()
    picked = sent[0].unsqueeze(-1).flatten(1).any(1).nonzero().flatten()  # in order
    return picked.expand(shape[:1].numel()) if operation in nodes.SELECTIONS else picked
