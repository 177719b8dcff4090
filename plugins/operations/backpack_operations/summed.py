"""Finds the samples where a model returns sums of rows, such as energies of molecules.

If the loss also has terms of the rows, such as the forces on atoms, it does not tell which of the
two are the samples. The model does: rows that it adds up belong to the sum that it returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import is_leaf
from backpack_core.record.call import Edge
from backpack_operations import nodes
from backpack_operations._torch import metadata_of
from backpack_operations.bridge import push
from backpack_operations.codes import codes
from backpack_operations.of_weights import Origins
from backpack_operations.order import reached
from backpack_operations.own_pass import beside_pass
from backpack_operations.received import is_returned
from backpack_operations.survey import GraphSurvey
from backpack_operations.told import Told


def told_by_sums(survey: GraphSurvey, roots: Iterable[Edge]) -> Told | None:
    """The sample of each row of a model's input, where the loss has terms of samples and of rows.

    ``None`` if it has terms of one length only, or if no operation is known to be a sum of rows.
    """
    if not survey.between or survey.is_declared or not survey.is_readable:
        return None  # only operations between modules add up rows
    terms, of_weights = _terms(survey, roots), Origins(survey).of_weights
    lengths = {_length(edge.node, edge.output_nr) for edge in terms if not of_weights(edge.node)}
    if len(lengths) < 2:
        return None
    count = min(lengths)  # there are fewer sums than rows
    sums = [*_as_long(survey, terms, count)]
    if not any(is_returned(edge.node, edge.output_nr) for edge in sums):
        return None
    runs = survey.runs_of(call for call, _ in survey.received)
    received = {size for run in runs for size in run.sizes if size > count}
    for edge in sums if received else ():
        is_kept = nodes.operation_of(edge.node) in nodes.VIEWS | nodes.TURNS | {"Stack"}
        if is_kept or survey.site_at(edge) is not None:  # a module with a rule keeps rows
            continue
        for position, (child, output_nr) in enumerate(edge.node.next_functions):
            if child is None or is_leaf(child) or of_weights(child):
                continue
            if _length(child, output_nr) in received:
                survey.values_read = True
                index = _index(edge, position)
                if index is not None:
                    return Told(index, count)
    return None


def _length(node: Node, output_nr: int) -> int:
    """The length of axis 0; zero for a number."""
    return (*nodes.lengths_of(node, output_nr), 0)[0]


def _terms(survey: GraphSurvey, roots: Iterable[Edge]) -> list[Edge]:
    """The tensors that were reduced to the numbers that the loss consists of."""

    def is_number(edge: Edge) -> bool:
        return not _length(edge.node, edge.output_nr) or nodes.is_stack_of_numbers(edge.node)

    numbers = reached(
        filter(is_number, roots), lambda edge: filter(is_number, survey.further(edge))
    )
    behind = (below for edge in numbers for below in survey.further(edge))
    return [*dict.fromkeys(edge for edge in behind if not is_number(edge))]


def _as_long(survey: GraphSurvey, starts: Iterable[Edge], count: int) -> Iterable[Edge]:
    """All edges behind the starts that are reached through tensors of a length only."""

    def is_as_long(edge: Edge) -> bool:
        return _length(edge.node, edge.output_nr) == count

    return reached(
        filter(is_as_long, starts), lambda edge: filter(is_as_long, survey.further(edge))
    )


def _index(edge: Edge, position: int) -> Tensor | None:
    """The row of a result to which each row of an operand is added; ``None`` if several.

    Ones, row numbers and random codes are sent back through the node. An operand's row that gets
    ``c``, ``c · n`` and ``c · code[n]`` was added to row ``n``.
    """
    metadata = metadata_of(edge.node, edge.output_nr)
    behind = [child for child, _ in edge.node.next_functions if child is not None]
    if not metadata.dtype.is_floating_point:
        return None
    shape, count = metadata.shape, metadata.shape[0]
    random = codes(count) / 2**63
    marks = torch.stack([torch.ones_like(random), torch.arange(count, device="cpu"), random])
    marks = marks.to(metadata.device, metadata.dtype).reshape(3, count, *[1] * (len(shape) - 1))
    mats = {edge.output_nr: marks.expand(3, *shape)}
    sent = beside_pass(partial(push, edge.node, mats), behind, metadata.device).get(position)
    if sent is None or not sent.numel():
        return None
    ones, numbers, checks = sent.detach().double().flatten(1).unflatten(1, (len(sent[0]), -1)).cpu()
    index = (numbers / ones).nan_to_num(0, 0, 0).round().long().clamp(0, count - 1)
    is_one = (checks / ones - random.to(ones)[index]).abs() < 1e-3  # false where ones are zero
    is_same = index == index[:, :1]
    return index[:, 0] if bool((is_one & is_same).all()) else None
