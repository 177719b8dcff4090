"""Which sample rows belong to, where a model returns sums of them: the energies of molecules, say.

A loss that has terms of the rows as well, as the forces of atoms are, does not tell which of both
are the samples. The model does: rows that it adds up belong to what it returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph.nodes import is_leaf
from backpack_core.record.call import Edge
from backpack_core.record.owner import is_returned
from backpack_operations import nodes
from backpack_operations._torch import metadata_of
from backpack_operations.bridge import push
from backpack_operations.of_weights import Origins
from backpack_operations.order import reached
from backpack_operations.own_pass import beside_pass
from backpack_operations.survey import GraphSurvey
from backpack_operations.told import Told


def told_by_sums(survey: GraphSurvey, roots: Iterable[Edge]) -> Told | None:
    """Rows of a model's input that belong to what it returned, where the loss has terms of both.

    ``None`` where it has terms of one kind only, or nothing is known to be a sum of rows.
    """
    if not survey.seen or survey.is_declared or not survey.is_readable:
        return None  # what adds rows up is not a module
    terms, of_weights = _terms(survey, roots), Origins(survey).of_weights
    lengths = {_length(edge.node, edge.output_nr) for edge in terms if not of_weights(edge.node)}
    if len(lengths) < 2:
        return None
    count = min(lengths)  # what is added up has more rows than there are sums
    found = [*_as_long(survey, terms, count)]
    if not any(is_returned(edge.node, edge.output_nr) for edge in found):
        return None
    received = {size for call, _ in survey.received for size in call.run.sizes if size > count}
    for edge in found if received else ():
        if survey.site_at(edge) is not None:  # a rule keeps rows
            continue
        for position, (child, number) in enumerate(edge.node.next_functions):
            if child is None or is_leaf(child) or of_weights(child):
                continue
            if _length(child, number) in received:
                survey.has_read = True
                index = _index(edge, position)
                if index is not None:
                    return Told(index, count)
    return None


def _length(node: Node, number: int) -> int:
    """How long axis 0 is; zero of a number."""
    return (*nodes.lengths_of(node, number), 0)[0]


def _terms(survey: GraphSurvey, roots: Iterable[Edge]) -> list[Edge]:
    """The last tensors before numbers, of which the loss consists."""

    def is_number(edge: Edge) -> bool:
        return not _length(edge.node, edge.output_nr) or nodes.is_stack_of_numbers(edge.node)

    numbers = reached(
        filter(is_number, roots), lambda edge: filter(is_number, survey.further(edge))
    )
    behind = (below for edge in numbers for below in survey.further(edge))
    return [*dict.fromkeys(edge for edge in behind if not is_number(edge))]


def _as_long(survey: GraphSurvey, starts: Iterable[Edge], count: int) -> Iterable[Edge]:
    """What can be reached through tensors of that length alone."""

    def is_as_long(edge: Edge) -> bool:
        return _length(edge.node, edge.output_nr) == count

    return reached(
        filter(is_as_long, starts), lambda edge: filter(is_as_long, survey.further(edge))
    )


def _index(edge: Edge, position: int) -> Tensor | None:
    """Which row of a result each row of an operand adds to; ``None`` unless each adds to one."""
    metadata = metadata_of(edge.node, edge.output_nr)
    behind = [child for child, _ in edge.node.next_functions if child is not None]
    if not metadata.dtype.is_floating_point:
        return None
    shape, count = metadata.shape, metadata.shape[0]
    codes = torch.rand(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    marks = torch.stack([torch.ones_like(codes), torch.arange(count, device="cpu"), codes])
    given = marks.to(metadata.device, metadata.dtype).reshape(3, count, *[1] * (len(shape) - 1))
    mats = {edge.output_nr: given.expand(3, *shape)}
    sent = beside_pass(partial(push, edge.node, mats), behind, metadata.device).get(position)
    if sent is None or not sent.numel():
        return None
    ones, numbers, checks = sent.detach().double().flatten(1).unflatten(1, (len(sent[0]), -1)).cpu()
    found = (numbers / ones).nan_to_num(0, 0, 0).round().long().clamp(0, count - 1)
    is_one = (checks / ones - codes.to(ones)[found]).abs() < 1e-3  # not so of zeros
    is_same = found == found[:, :1]
    return found[:, 0] if bool((is_one & is_same).all()) else None
