"""Finds out whether each tensor of a list that a model received is one sample's.

As of bags, sets and graphs of several sizes. Lengths do not tell it from tensors that have samples
in front, one of which may be as long by chance. The ends do: one entry at a loss for each item of
the list, and made of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from backpack_core.record.call import Call, Edge
from backpack_core.record.owner import is_returned
from backpack_core.record.run import Run
from backpack_operations import faults, nodes
from backpack_operations.alignment import Place
from backpack_operations.data import groups, is_packed, lengths_of
from backpack_operations.moves import Numbers, are_elsewhere
from backpack_operations.of_weights import Origins
from backpack_operations.owners import Owners
from backpack_operations.survey import GraphSurvey, edges_behind

Reading: TypeAlias = tuple[int, int | None]  # how many samples, and at which depth each item is one


def tell_parts(survey: GraphSurvey) -> None:
    """Correct the number of samples, if each of several tensors is one sample's.

    It is a fault of a survey if tensors of several lengths were joined, and may be anything.
    """
    samples, calls = survey.batch_size, dict.fromkeys(call for call, _ in survey.received)
    runs = {id(call.run): call.run for call in calls if not call.run.has_computed_input}.values()
    if all(len(run.inputs) < 2 for run in runs):
        return
    fresh = [c for c in calls if not (c.rule.is_loss or any(c.edges[:1]) or _is_whole(c))]
    readings = _readings(survey, runs, fresh)
    _read(survey, samples, None)
    lengths = [(call, lengths_of(call)) for call in fresh]
    ragged = [call for call, known in lengths if len(known) > 1 and samples in known]
    ragged += [] if readings else [call for call in fresh if _is_padded(call)]
    if not (readings or ragged):
        return
    plain = (samples, None)
    if any(_fits(survey, *reading) for reading in (*readings, plain)):
        return
    reading = readings[0] if readings else plain
    if not (fresh or _ends(survey, samples)):
        # No module has received any of it: the number of entries at the ends is all there is.
        _read(survey, *reading)
        return
    given = {given.shape[0] for run in runs for given in run.inputs if given.shape}
    rows = {call.stored.inputs[0].shape[:1].numel() for call in fresh}
    is_joined = reading[0] not in given and not rows <= given  # items, and nothing is as many
    is_told = any(map(is_packed, fresh))
    if is_joined and (is_told or not readings):
        _read(survey, reading[0], None)
        return
    unproven = fresh if is_joined else ragged
    if not (unproven or is_told) and _are_hidden(survey, fresh, reading, plain):
        unproven = fresh
    _read(survey, *plain)
    if unproven:
        survey.faults.append((faults.ragged(unproven[0]), None))


def _readings(survey: GraphSurvey, runs: Iterable[Run], fresh: list[Call]) -> list[Reading]:
    """Ways to take each item of a list for a sample that losses, and modules, do not contradict."""
    deepest = max((len(given.path) for run in runs for given in run.inputs), default=0)
    found = list[Reading]()
    for depth in range(deepest):
        counts = {len(group) for run in runs for group in groups(run, depth)}
        found += [(n, depth) for n in counts if len(counts) == 1 and _ends(survey, n)]
    return [reading for reading in found if _may_be(survey, fresh, *reading)]


def _is_padded(call: Call) -> bool:
    """Whether a module received one row for each item of a list of several lengths."""
    rows = call.stored.inputs[0].shape[:1].numel()
    depths = range(max((len(given.path) for given in call.run.inputs), default=0))
    lists = [group for depth in depths for group in groups(call.run, depth)]
    lengths = [{given.shape[0] for given in group if given.shape} for group in lists]
    return any(
        len(group) == rows and len(known) > 1 and rows not in known
        for group, known in zip(lists, lengths, strict=True)
    )


def _are_hidden(survey: GraphSurvey, fresh: list[Call], reading: Reading, plain: Reading) -> bool:
    """Whether modules have received items, and something hides whose the entries at ends are."""
    is_one_for_each = {n for _, n in _losses(survey)} == {reading[0]}
    is_known = is_one_for_each and _knows(survey, fresh, *reading)
    return is_known and not _knows(survey, fresh, *plain)


def _knows(survey: GraphSurvey, fresh: list[Call], samples: int, depth: int | None) -> bool:
    """Whether the samples of all that modules have received are known."""
    _read(survey, samples, depth)
    owners = Owners(survey)
    return bool(fresh) and all(owners.of_input(call) is not None for call in fresh)


def _is_whole(call: Call) -> bool:
    """Whether a module received nothing, or all that the model did: neither tells items apart."""
    shapes = [tuple(tensor.shape) for tensor in call.stored.inputs]
    return not shapes or (len(shapes) > 1 and shapes == [given.shape for given in call.run.inputs])


def _read(survey: GraphSurvey, samples: int, depth: int | None) -> None:
    """Say how many samples there are, and at which depth each item is one, if any is."""
    survey.batch_size, survey.depth, survey.numbers = samples, depth, {}


def _may_be(survey: GraphSurvey, fresh: list[Call], samples: int, depth: int | None) -> bool:
    """Whether modules have received something of each item, as far as that is known."""
    _read(survey, samples, depth)
    owners = Owners(survey)
    known = [numbers for call in fresh if (numbers := owners.of_input(call)) is not None]
    if not known or len(known) < len(fresh):
        return True
    return torch.arange(samples, device="cpu").equal(
        torch.cat([*map(torch.flatten, known)]).unique()
    )


def _fits(survey: GraphSurvey, samples: int, depth: int | None) -> bool:
    """Whether samples are at the ends one after the other, if they are what is said."""
    _read(survey, samples, depth)
    if depth is None and any(n != samples for _, n in _losses(survey)):
        return False
    owners, every = Owners(survey), torch.arange(samples, device="cpu")
    ends = [owners.numbers_at(end) for end in _ends(survey, samples)]
    survey.numbers = {}
    return bool(ends) and all(_are(numbers, every) for numbers in ends)


def _are(numbers: Numbers | None, samples: Tensor) -> bool:
    if numbers is None or not numbers.dim() or are_elsewhere(numbers):
        return False
    return numbers.flatten().expand(len(samples)).equal(samples)


def _losses(survey: GraphSurvey) -> list[tuple[Edge, int]]:
    """What extended losses received, and how many rows that has."""
    losses = [(call.edges[:1], n) for (call, _), n in survey.received.items() if call.rule.is_loss]
    return [(edge, n) for (edge,), n in losses if edge is not None]


def _ends(survey: GraphSurvey, count: int) -> list[Place]:
    """What extended losses received with so many rows; or what models returned with as many.

    Where models return their losses and no rule is known, what these numbers were made of.
    """
    ends = [edge[:2] for edge, n in _losses(survey) if n == count]
    if not ends:
        ends = [end for end in _returned(survey) if nodes.lengths_of(*end)[:1] == (count,)]
    if not (ends or _losses(survey)):
        ends = [end for end in _reduced(survey) if nodes.lengths_of(*end)[:1] == (count,)]
    return ends


def _reduced(survey: GraphSurvey) -> Iterator[Place]:
    """Tensors of data that operations make single numbers of."""
    of_weights = Origins(survey).of_weights
    for node, _ in survey.seen:
        if len(node._input_metadata) == 1 and not nodes.lengths_of(node, 0):
            behind = [edge[:2] for _, edge in edges_behind(node)]
            yield from (end for end in behind if nodes.lengths_of(*end) and not of_weights(end[0]))


def _returned(survey: GraphSurvey) -> Iterator[Place]:
    between = {node for node, _ in survey.seen} | {site.edge.node for site in survey.sites.values()}
    for node in between:
        numbers = range(len(node._input_metadata))
        yield from ((node, number) for number in numbers if is_returned(node, number))
