"""Finds the number of samples of a backward pass, and the axis that they are declared to lie on.

Everything that is known of samples starts from this number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.record.call import Call
from backpack_core.record.owner import OWNER_ATTRIBUTE, PATH_ATTRIBUTE, Owner
from backpack_core.record.run import NO_RUN, rows_of
from backpack_operations import nodes
from backpack_operations.of_weights import Origins
from backpack_operations.survey import GraphSurvey, edges_behind


def declared_axis(call: Call) -> int:
    """The axis that ``extend`` was told for the samples of a call; else 0."""
    attributes = call.module.__dict__
    owner: Owner | None = attributes.get(OWNER_ATTRIBUTE)
    is_loss = call.rule.is_loss
    if owner is None or is_loss or not owner.axes:
        return 0
    path = attributes.get(PATH_ATTRIBUTE, "")
    while path and path not in owner.axes:  # what holds for a part, holds inside of it
        path = path.rpartition(".")[0]
    return owner.axes.get(path, 0)


def is_doubtful(shape: tuple[int, ...], samples: int) -> bool:
    """Whether several samples are as many as axis 0 is long, and as another axis is."""
    return samples > 1 and shape[:1] == (samples,) and samples in shape[1:]


def batch_of(survey: GraphSurvey) -> int:
    """The number of samples: the length that the model received, if it is known.

    What single calls received decides only if that is unknown, and what a model received from
    another one only if there is one loss. A loss may have several entries for
    each sample (``logits.flatten(0, 1)``), and a module may receive something without samples (a
    table of positions), several samples as one, or some of the samples, which were picked.
    """
    received = survey.received
    sizes = [call.stored.inputs[0].shape[:1].numel() for call, _ in received]
    if not sizes:
        return 0
    calls = dict.fromkeys(call for call, _ in received if not survey.is_loss(call))
    runs = [n for call in calls for n in call.run.sizes]
    outer = {n for call in calls if not call.run.has_computed_input for n in call.run.sizes}
    losses, entering = _of_losses(survey), [*_entering(calls)]
    pooled = {} if survey.is_declared else _pooled(survey)
    runs, outer = [pooled.get(n, n) for n in runs], {pooled.get(n, n) for n in outer}
    entering = [pooled.get(n, n) for n in entering]
    if {*sizes} != {sizes[0]}:
        others, handed = _of_others(survey, outer or entering)
        others -= outer if outer <= others else set()  # these are as many by chance
        losses -= others
        others |= handed
        runs, entering = ([n for n in of if n not in others] for of in (runs, entering))
    known = runs or [*entering, *(losses if len(losses) == 1 else ())]
    candidates: dict[int, None] = dict.fromkeys(known)
    if runs and len(losses) != 1:  # what runs on what others send may see some of the samples
        candidates = dict.fromkeys(n for n in candidates if n in outer) or candidates
    candidates.pop(0, None)
    if not candidates or ({*sizes} == {sizes[0]} and sizes[0] in candidates):
        return sizes[0]
    fitting = [n for n in candidates if not any(rows % n for rows in losses)]
    if next(iter(candidates)) not in fitting:  # the first has many for one sample, as graphs have
        fitting = [n for n in fitting if n in sizes]  # nodes, and edges on axis 0 come in pairs
    most = max(outer, default=0)  # more than that are several of each sample, as draws are
    of_loss = [n for n in fitting if losses == {n} and (n <= most or not most)]
    possible = of_loss or [n for n in fitting if n in outer] or fitting
    return max(possible or candidates, key=sizes.count)  # the first of several


def some_rows(survey: GraphSurvey) -> tuple[int, dict[Node, Tensor]]:
    """How many samples there are if models ran on different rows of a tensor; which each call got.

    Zero and nothing if all ran on the same rows, or nobody asks which rows are one sample's. Of a
    model that computes something of the rows before its first layer, no call got any.

    Returns:
        The number of different rows, and those of calls, by the node of what they returned.
    """
    received = [place for place in survey.received.items() if not survey.is_loss(place[0][0])]
    runs = {id(call.run) for (call, _), _ in received}
    is_one = len(runs) == 1 and id(NO_RUN) not in runs
    if is_one or not (survey.tells_samples or len({size for _, size in received}) > 1):
        return 0, {}
    found: dict[int, list[tuple[range, Node | None]]] = defaultdict(list)  # by memory
    inner: dict[int, list[tuple[range, Node | None]]] = defaultdict(list)
    turned = {id(call.run) for (call, index), _ in received if survey.axes[call, index]}
    for (call, index), size in received:
        run, is_first = call.run, call.run.receives(call.stored.inputs)
        known = None if id(run) in turned else run.rows
        if run is NO_RUN and not (any(call.edges) or survey.axes[call, index]):
            known, is_first = rows_of(call.stored.inputs[0]), True
        if known is not None:
            is_given = is_first and size == len(known[1])
            node = survey.sites[call, index].edge.node if is_given else None
            (inner if run.has_computed_input else found)[known[0]].append((known[1], node))
    for memory in found or inner:  # what runs on what others send has their samples
        found[memory] += inner[memory]
    parts = [of for of in found.values() if len({rows for rows, _ in of}) > 1]
    every = [sorted({row for rows, _ in of for row in rows}) for of in parts]
    if not every or any(rows != every[0] for rows in every):
        return 0, {}
    call = received[0][0][0]
    device = call.stored.outputs[0].device
    return len(every[0]), {
        node: torch.tensor([bisect_left(every[0], row) for row in rows], device=device)
        for of in parts
        for rows, node in of
        if node is not None
    }


def other_run(survey: GraphSurvey) -> tuple[Call, int] | None:
    """A call of a model that received several times as many entries as there are samples.

    They are several for each sample if anything says so: losses have one for each, or an operation
    makes one of several. Where neither does, they may be other samples. So they are where a module
    received one entry, and elsewhere several: each call is for a sample. ``None`` if there is none.
    """
    samples = survey.batch_size
    if samples == 1 and not survey.rows and (other := _for_each(survey)) is not None:
        return other
    if not samples or survey.rows or survey.depth is not None or _of_losses(survey) == {samples}:
        return None
    for call, _ in survey.received:
        sizes = () if survey.is_loss(call) or call.run.has_computed_input else call.run.sizes
        sizes = sizes or tuple(_entering([call] if call.run is NO_RUN else []))
        rows = next((n for n in sizes if n > samples and not n % samples), 0)
        if rows and samples not in sizes:
            fewer = (node for node, n, after in _changes(survey) if n[0] == rows > after[0])
            if all(nodes.operation_of(node) in nodes.PICKS for node in fewer):
                return call, rows
    return None


def _for_each(survey: GraphSurvey) -> tuple[Call, int] | None:
    """A call of a module that received one entry at one time, and several at another."""
    known: dict[Module, int] = {}
    for (call, _), size in survey.received.items():
        is_part = call.run is NO_RUN and not any(call.edges)
        is_first = not survey.is_loss(call) and (is_part or call.receives_input > 1)
        if is_first and {size, known.setdefault(call.module, size)} > {1}:
            return call, max(size, known[call.module])
    return None


def _of_losses(survey: GraphSurvey) -> set[int]:
    return {size for (call, _), size in survey.received.items() if call.rule.is_loss}


def _of_others(survey: GraphSurvey, outer: Container[int]) -> tuple[set[int], set[int]]:
    """Numbers of rows that are not those of the samples: fewer or more, by what operations do.

    Args:
        survey: What is known about the graph.
        outer: What models received from outside.

    Returns:
        How many rows were picked of more, or several axes merged into; and how many were handed
        out to more, unless these are made into as many again (tokens of a sample, of its own).
    """
    origins, found, handed, made = Origins(survey), set(), set(), set()
    for node, before, after in _changes(survey):
        (n, *inner), (rows, *others), name = before, after, nodes.operation_of(node)
        is_merged = 1 < n < rows and n in outer and rows not in outer
        is_merged &= len(inner) > len(others) or name == "Repeat"
        is_known = name in nodes.PICKS and (rows < n or is_merged)
        if is_known or (is_merged and name in ("View", "UnsafeView", "Repeat")):
            found |= set() if origins.of_weights(node) else {rows}
        elif name in nodes.SCATTERS and n < rows and n not in made:
            handed.add(n)
        made |= {rows} if name in ("View", "UnsafeView") else set()  # consumers come first
    return found, handed


def _pooled(survey: GraphSurvey) -> dict[int, int]:
    """Numbers of rows that operations add up into fewer, as nodes into graphs; and of how many.

    An index says which rows belong together, so these are not samples: the fewer may be. But for
    those that a loss has further on, which are compared with what they add up to.
    """
    origins, found, above = Origins(survey), dict[int, int](), _of_losses(survey)
    between = [node for node, _ in survey.seen]  # consumers first
    if not any(nodes.operation_of(node) in nodes.SCATTERS for node in between):
        return found
    for node in between:
        rows, *_ = nodes.lengths_of(node, 0) or (0,)
        if nodes.operation_of(node) in nodes.SCATTERS and not origins.of_weights(node):
            behind = [nodes.lengths_of(*edge[:2])[:1] for _, edge in edges_behind(node)]
            for (n,) in filter(None, behind):
                if n > rows and n not in above:
                    found.setdefault(n, found.get(rows, rows))
        above.add(rows)
    return found


def _changes(survey: GraphSurvey) -> Iterator[tuple[Node, tuple[int, ...], tuple[int, ...]]]:
    """Operations between modules that change the length of axis 0, with shapes before and after."""
    for node, _ in survey.seen:
        after = {nodes.lengths_of(node, number) for number in range(len(node._input_metadata))}
        for child, number in node.next_functions:
            before = () if child is None else nodes.lengths_of(child, number)
            yield from ((node, before, s) for s in after if before and s and s[0] != before[0])


def _entering(calls: Iterable[Call]) -> Iterator[int]:
    """What parts of a model received that were called by themselves, where no graph was behind."""
    for call in calls:
        if call.stored.inputs and not any(call.edges):
            yield call.stored.inputs[0].shape[:1].numel()
