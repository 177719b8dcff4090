"""Finds out whether a model received one tensor for each sample, in a list.

Bags, sets and graphs of several sizes are given so. Shapes do not distinguish such a list from
several tensors with samples in front. The end of the graph does: with one tensor for each sample,
the loss receives one entry for each item of the list, computed from that item alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from backpack_core.record.call import Call, Edge
from backpack_core.record.models import Run
from backpack_operations import faults, nodes, tensor_lists
from backpack_operations.carried_ids import CarriedIds
from backpack_operations.nodes import NodeOutput
from backpack_operations.of_weights import Origins
from backpack_operations.received import is_returned
from backpack_operations.sample_ids import SampleIds, are_elsewhere
from backpack_operations.survey import GraphSurvey, edges_behind

# An assumption about the arguments: the number of samples, and the depth at which each item is one.
Reading: TypeAlias = tuple[int, int | None]


def tell_parts(survey: GraphSurvey) -> None:
    """Correct the survey's number of samples and depth, if each tensor of a list is one sample.

    A fault is recorded if tensors of several lengths were joined, and no reading explains it.
    """
    samples, calls = survey.batch_size, dict.fromkeys(call for call, _ in survey.received)
    runs = [run for run in survey.runs_of(calls) if not run.has_computed_input]
    if all(max(len(run.inputs), tensor_lists.deepest(run)) < 2 for run in runs):
        return  # a single argument
    fresh = [c for c in calls if not (c.rule.is_loss or any(c.edges[:1]) or _is_whole(c))]
    readings = _readings(survey, runs, fresh)
    _assume(survey, samples, None)
    lengths = [(call, tensor_lists.joined_lengths(call)) for call in fresh]
    ragged = [call for call, known in lengths if len(known) > 1 and samples in known]
    ragged += [] if readings else [call for call in fresh if _is_padded(call)]
    if not (readings or ragged):
        return
    plain = (samples, None)
    if any(_ends_in_order(survey, *reading) for reading in (*readings, plain)):
        return
    reading = readings[0] if readings else plain
    if not (fresh or _ends(survey, samples)):
        # No module received data by itself: only the number of entries at the ends is known.
        _assume(survey, *reading)
        return
    given = {given.shape[0] for run in runs for given in run.inputs if given.shape}
    rows = {call.stored.inputs[0].shape[:1].numel() for call in fresh}
    is_joined = reading[0] not in given and not rows <= given  # no argument has as many rows
    is_told = any(map(tensor_lists.is_packed, fresh))
    if is_joined and (is_told or not readings):
        _assume(survey, reading[0], None)
        return
    unproven = fresh if is_joined else ragged
    if not (unproven or is_told) and _are_hidden(survey, fresh, reading, plain):
        unproven = fresh
    _assume(survey, *plain)
    if unproven:
        survey.faults.append((faults.ragged(unproven[0]), None))


def _readings(survey: GraphSurvey, runs: Iterable[Run], fresh: list[Call]) -> list[Reading]:
    """The readings with one item for each sample that neither losses nor modules contradict."""
    readings, is_one = list[Reading](), _rows_at_ends(survey) == {1}
    for depth in range(max(map(tensor_lists.deepest, runs), default=0)):
        counts = {len(items) for run in runs for items in tensor_lists.lists_of_kinds(run, depth)}
        # A list of one tensor is one sample if the net has one row at its ends, and nothing else.
        counts -= set() if is_one else {1}
        readings += [(n, depth) for n in counts if len(counts) == 1 and _ends(survey, n)]
    return [reading for reading in readings if _is_possible(survey, fresh, *reading)]


def _is_padded(call: Call) -> bool:
    """Whether a module received one row for each item of a list of several lengths."""
    if tensor_lists.is_given(call):
        return False
    rows = call.stored.inputs[0].shape[:1].numel()
    lists = [
        (items, {g.shape[0] for g in items if g.shape})
        for items in tensor_lists.all_kinds(call.run)
    ]
    return any(len(i) == rows and len(known) > 1 and rows not in known for i, known in lists)


def _are_hidden(survey: GraphSurvey, fresh: list[Call], reading: Reading, plain: Reading) -> bool:
    """Whether modules received one item per sample, but these are lost on the way to the end."""
    if {n for _, n in _losses(survey)} != {reading[0]}:
        return False
    return _knows(survey, fresh, *reading) and not _knows(survey, fresh, *plain)


def _knows(survey: GraphSurvey, fresh: list[Call], samples: int, depth: int | None) -> bool:
    """Whether the ids of all data that modules received are known, under a reading."""
    _assume(survey, samples, depth)
    carried = CarriedIds(survey)
    return bool(fresh) and all(carried.of_input(call) is not None for call in fresh)


def _is_whole(call: Call) -> bool:
    """Whether a module received nothing, or all of the arguments: neither distinguishes items."""
    shapes = [tuple(tensor.shape) for tensor in call.stored.inputs]
    return not shapes or (len(shapes) > 1 and shapes == [given.shape for given in call.run.inputs])


def _assume(survey: GraphSurvey, samples: int, depth: int | None) -> None:
    """Put a reading into the survey, and forget the ids that were carried under another."""
    survey.batch_size, survey.depth = samples, depth
    survey.sample_ids, survey.input_ids = {}, {}


def _is_possible(survey: GraphSurvey, fresh: list[Call], samples: int, depth: int | None) -> bool:
    """Whether modules received data of every sample under a reading, if that is known.

    Of several arguments it must be known, since they seldom are samples: ``model(x, mask)``.
    """
    _assume(survey, samples, depth)
    carried = CarriedIds(survey)
    known = [ids for call in fresh if (ids := carried.of_input(call)) is not None]
    if not known or len(known) < len(fresh):
        return bool(depth)
    received = torch.cat([*map(torch.flatten, known)]).unique()
    return torch.arange(samples, device="cpu").equal(received)


def _ends_in_order(survey: GraphSurvey, samples: int, depth: int | None) -> bool:
    """Whether the samples arrive at the ends one after the other, under a reading."""
    _assume(survey, samples, depth)
    if depth is None and any(n != samples for _, n in _losses(survey)):
        return False
    carried, every = CarriedIds(survey), torch.arange(samples, device="cpu")
    found = {end: carried.at(end) for end in _ends(survey, samples)}
    told = [ids for end, ids in found.items() if not carried.is_guessed(end)]
    survey.sample_ids = {}
    return bool(told) and all(_are_in_order(ids, every) for ids in told)


def _are_in_order(ids: SampleIds | None, samples: Tensor) -> bool:
    if ids is None or not ids.dim() or are_elsewhere(ids):
        return False
    return ids.flatten().expand(len(samples)).equal(samples)


def _losses(survey: GraphSurvey) -> list[tuple[Edge, int]]:
    """The first inputs of extended losses, with their numbers of rows."""
    losses = [(call.edges[:1], n) for (call, _), n in survey.received.items() if call.rule.is_loss]
    return [(edge, n) for (edge,), n in losses if edge is not None]


def _rows_at_ends(survey: GraphSurvey) -> set[int]:
    """The numbers of rows that extended losses received and that models returned."""
    returned = {n for end in _returned(survey) for n in nodes.lengths_of(*end)[:1]}
    return returned | {n for _, n in _losses(survey)}


def _ends(survey: GraphSurvey, count: int) -> list[NodeOutput]:
    """The tensors with so many rows at which the net ends.

    These are inputs of extended losses, or else what models returned. Where models return losses
    that have no rule, they are the tensors from which the losses were reduced. A parameter that
    was expanded to the length of the batch is none of them if there is another one.
    """
    of_losses = [edge[:2] for edge, n in _losses(survey) if n == count]
    returned = [end for end in _returned(survey) if nodes.lengths_of(*end)[:1] == (count,)]
    of_constants = Origins(survey).of_constants
    for ends in (of_losses, returned):
        if told := [end for end in ends if not of_constants(end[0])]:
            return told
    ends = of_losses or returned
    if not (ends or _losses(survey)):
        ends = [end for end in _reduced(survey) if nodes.lengths_of(*end)[:1] == (count,)]
    return ends


def _reduced(survey: GraphSurvey) -> Iterator[NodeOutput]:
    """Tensors of data that operations reduce to single numbers."""
    of_weights = Origins(survey).of_weights
    for node, _ in survey.between:
        if len(node._input_metadata) == 1 and not nodes.lengths_of(node, 0):
            behind = [edge[:2] for _, edge in edges_behind(node)]
            yield from (end for end in behind if nodes.lengths_of(*end) and not of_weights(end[0]))


def _returned(survey: GraphSurvey) -> Iterator[NodeOutput]:
    """Tensors that models returned."""
    between = {node for node, _ in survey.between} | {
        site.edge.node for site in survey.sites.values()
    }
    for node in between:
        outputs = range(len(node._input_metadata))
        yield from ((node, nr) for nr in outputs if is_returned(node, nr))
