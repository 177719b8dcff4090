"""Finds the number of samples of a backward pass, and the declared axis of the samples.

Only lengths are known at this point, and the number decides what else is looked at. Usually the
model received it; otherwise calls, losses and operations give evidence.
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
from backpack_core.record.models import NO_RUN, OWNER_ATTRIBUTE, PATH_ATTRIBUTE, Owner
from backpack_operations import nodes
from backpack_operations.of_weights import Origins
from backpack_operations.order import behind
from backpack_operations.received import ModelRun, is_returned, returned, rows_of
from backpack_operations.survey import GraphSurvey, edges_behind


def declared_axis(call: Call) -> int:
    """The axis of the samples that ``extend(batch_axis=...)`` declared for a call; else 0."""
    attributes = call.module.__dict__
    owner: Owner | None = attributes.get(OWNER_ATTRIBUTE)
    is_loss = call.rule.is_loss
    if owner is None or is_loss or not owner.axes:
        return 0
    path = attributes.get(PATH_ATTRIBUTE, "")
    while path and path not in owner.axes:  # a declaration holds for everything inside
        path = path.rpartition(".")[0]
    return owner.axes.get(path, 0)


def is_doubtful(shape: tuple[int, ...], samples: int) -> bool:
    """Whether axis 0 and another axis both have the length of the batch."""
    return samples > 1 and shape[:1] == (samples,) and samples in shape[1:]


def batch_of(survey: GraphSurvey) -> int:
    """The number of samples: the length that the model received, if it is known.

    If it is unknown, what single calls received decides. What a model received from another model
    counts only if there is one loss. Evidence may mislead: a loss may have several entries for each
    sample (``logits.flatten(0, 1)``), a module may receive a table of positions, samples merged
    into one, or some samples that were picked.
    """
    received, unheard = survey.received, survey.unheard
    sizes = [call.stored.inputs[0].shape[:1].numel() for call, _ in received]
    for output, run in unheard.items():  # a number has no rows
        sizes += (nodes.lengths_of(*output) or run.sizes)[:1]
    if not sizes:
        return 0
    calls = dict.fromkeys(call for call, _ in received if not survey.is_loss(call))
    every = survey.runs_of(calls)
    runs = [n for run in every for n in run.sizes]
    outer = {n for run in every if not run.has_computed_input for n in run.sizes}
    losses, entering = _of_losses(survey), [*_entering(calls)]
    pooled = {} if survey.is_declared else _pooled(survey)
    runs, outer = [pooled.get(n, n) for n in runs], {pooled.get(n, n) for n in outer}
    entering = [pooled.get(n, n) for n in entering]
    if {*sizes} != {sizes[0]}:
        others, handed = _of_others(survey, outer or entering)
        # As many by chance, where no call received another number that the model did.
        others -= set() if (outer - others) & {*sizes} else outer
        losses -= others
        others |= handed
        runs, entering = ([n for n in of if n not in others] for of in (runs, entering))
    known = runs or [*entering, *(losses if len(losses) == 1 else ())]
    candidates: dict[int, None] = dict.fromkeys(known)
    if runs and len(losses) != 1:  # an inner model may see some samples only
        candidates = dict.fromkeys(n for n in candidates if n in outer) or candidates
    candidates.pop(0, None)
    if not candidates or ({*sizes} == {sizes[0]} and sizes[0] in candidates):
        return sizes[0]
    fitting = [n for n in candidates if not any(rows % n for rows in losses)]
    if next(iter(candidates)) not in fitting:  # the first argument has several rows per sample
        fitting = [n for n in fitting if n in sizes]  # (nodes of graphs): not just any divisor
    most = max(outer, default=0)  # a larger number counts several draws per sample
    of_loss = [n for n in fitting if losses == {n} and (n <= most or not most)]
    possible = of_loss or [n for n in fitting if n in outer] or fitting
    return max(possible or candidates, key=sizes.count)  # the first of several


def some_rows(survey: GraphSurvey) -> tuple[int, dict[Node, Tensor]]:
    """The number of samples if models ran on different rows of one tensor, as in a loop.

    Returns:
        The number of different rows, and the rows that each call received, by the node of its
        output. Zero and an empty dictionary if all ran on the same rows, or no extension
        distinguishes samples. A model that computes something before its first layer has no call
        with rows.
    """
    received = [item for item in survey.received.items() if not survey.is_loss(item[0][0])]
    unheard = survey.unheard
    runs = survey.runs_of(call for (call, _), _ in received)
    is_one = len(runs) == 1 and NO_RUN not in runs
    if is_one or not (survey.tells_samples or len({size for _, size in received}) > 1):
        return 0, {}
    outer: dict[int, list[tuple[range, Node | None]]] = defaultdict(list)  # by memory
    inner: dict[int, list[tuple[range, Node | None]]] = defaultdict(list)
    turned = {id(call.run) for (call, index), _ in received if survey.axes[call, index]}
    for (call, index), size in received:
        run, is_first = call.run, call.run.receives(call.stored.inputs)
        # A memory, and the rows of it.
        view = run.rows if isinstance(run, ModelRun) and id(run) not in turned else None
        if run is NO_RUN and not (any(call.edges) or survey.axes[call, index]):
            view, is_first = rows_of(call.stored.inputs[0]), True
        if view is not None:
            is_given = is_first and size == len(view[1])
            node = survey.sites[call, index].edge.node if is_given else None
            (inner if run.has_computed_input else outer)[view[0]].append((view[1], node))
    for (node, number), run in unheard.items():
        if run.rows is not None:
            is_given = nodes.lengths_of(node, number)[:1] == (len(run.rows[1]),)
            outer[run.rows[0]].append((run.rows[1], node if is_given else None))
    for memory in outer or inner:  # an inner model has the samples of the model around it
        outer[memory] += inner[memory]
    parts = [of for of in outer.values() if len({rows for rows, _ in of}) > 1]
    every = [sorted({row for rows, _ in of for row in rows}) for of in parts]
    if not every or any(rows != every[0] for rows in every):
        return 0, {}
    return len(every[0]), {
        node: torch.tensor([bisect_left(every[0], row) for row in rows], device="cpu")
        for of in parts
        for rows, node in of
        if node is not None
    }


def other_run(survey: GraphSurvey) -> tuple[Call, int] | None:
    """A call of a model for other samples than the batch, with its number of rows; or ``None``.

    It received a multiple of ``N`` rows. They are several rows of each sample if losses have one
    row for each, or if an operation makes one row of several; otherwise they may be other samples.
    They also are if a module received one entry in one call and several in another.
    """
    samples = survey.batch_size
    if samples == 1 and not survey.call_rows and (other := _for_each(survey)) is not None:
        return other
    is_one_each = survey.depth is not None or _of_losses(survey) == {samples}
    if not samples or survey.call_rows or is_one_each:
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
    """A call of a module that received one entry here and several there; or ``None``."""
    known: dict[Module, int] = {}
    for (call, _), size in survey.received.items():
        is_part = call.run is NO_RUN and not any(call.edges)
        is_first = not survey.is_loss(call) and (is_part or call.receives_input > 1)
        if is_first and {size, known.setdefault(call.module, size)} > {1}:
            return call, max(size, known[call.module])
    return None


def _of_losses(survey: GraphSurvey) -> set[int]:
    """The numbers of rows that extended losses received."""
    return {size for (call, _), size in survey.received.items() if call.rule.is_loss}


def _of_others(survey: GraphSurvey, outer: Container[int]) -> tuple[set[int], set[int]]:
    """Numbers of rows that cannot be those of the samples, as operations show.

    Args:
        survey: What is known about the graph.
        outer: The numbers of rows that models received from outside.

    Returns:
        Numbers of rows that were picked from more, or that several axes were merged into; and
        numbers of rows that were scattered into more, unless a view has that many rows as well, or
        a model did that which received as many from outside.
    """
    every = {node for node, _ in survey.between}.union(s.edge.node for s in survey.sites.values())
    ends = {node for node in every for number in returned(node) if is_returned(node, number)}
    own = ends | behind(ends)
    survey.tables = {site.edge.node for site in survey.sites.values() if _is_of_code(site.call)}
    origins, picked, scattered, of_views = Origins(survey), set(), set(), set()
    for node, before, after in _changes(survey):
        (n, *inner), (rows, *others), name = before, after, nodes.operation_of(node)
        is_merged = 1 < n < rows and n in outer and rows not in outer
        is_merged &= len(inner) > len(others) or name == "Repeat"
        is_known = name in nodes.PICKS and (rows < n or is_merged)
        if is_known or (is_merged and name in ("View", "UnsafeView", "Repeat")):
            picked |= set() if origins.of_tables(node) else {rows}
        elif name in nodes.SCATTERS and n < rows and n not in of_views:
            if node in own and n in outer:
                continue
            scattered.add(n)
        of_views |= {rows} if name in ("View", "UnsafeView") else set()  # consumers come first
    survey.tables = set()
    return picked, scattered


def _is_of_code(call: Call) -> bool:
    """Whether a call received one row that is not of the model's input, to make weights of it."""
    is_single = not call.rule.is_loss and [*_entering([call])] == [1]
    return is_single and bool(call.run.sizes) and not call.receives_input


def _pooled(survey: GraphSurvey) -> dict[int, int]:
    """Numbers of rows that an index adds up into fewer, as nodes into graphs, each with the latter.

    The sums may be the samples, and the rows are not. Exempt are rows that a loss also has: it
    compares them with their sums.
    """
    origins, pooled, above = Origins(survey), dict[int, int](), _of_losses(survey)
    between = [node for node, _ in survey.between]  # consumers first
    if not any(nodes.operation_of(node) in nodes.SCATTERS for node in between):
        return pooled
    for node in between:
        rows, *_ = nodes.lengths_of(node, 0) or (0,)
        if nodes.operation_of(node) in nodes.SCATTERS and not origins.of_weights(node):
            behind = [nodes.lengths_of(*edge[:2])[:1] for _, edge in edges_behind(node)]
            for (n,) in filter(None, behind):
                if n > rows and n not in above:
                    pooled.setdefault(n, pooled.get(rows, rows))
        above.add(rows)
    return pooled


def _changes(survey: GraphSurvey) -> Iterator[tuple[Node, tuple[int, ...], tuple[int, ...]]]:
    """Operations between modules that change the length of axis 0, with shapes before and after."""
    for node, _ in survey.between:
        after = {nodes.lengths_of(node, number) for number in range(len(node._input_metadata))}
        for child, number in node.next_functions:
            before = () if child is None else nodes.lengths_of(child, number)
            yield from ((node, before, s) for s in after if before and s and s[0] != before[0])


def _entering(calls: Iterable[Call]) -> Iterator[int]:
    """Numbers of rows that calls received as data, with no graph behind them."""
    for call in calls:
        if call.stored.inputs and not any(call.edges):
            yield call.stored.inputs[0].shape[:1].numel()
