"""Finds where the samples lie in a graph, and opens the calls whose rules do not fit there.

Most graphs have samples on axis 0 of every call, which is quickly seen. All others are walked
(``alignment_walk.py``). See ``docs/design/operations.md``.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.view import View
from backpack_operations import faults, nodes
from backpack_operations.alignment import Alignment
from backpack_operations.alignment_walk import Walk
from backpack_operations.batch import declared_axis, is_doubtful
from backpack_operations.entering_ids import is_of_buffers
from backpack_operations.of_weights import Origins
from backpack_operations.order import children_of, reached
from backpack_operations.owners import Owners
from backpack_operations.paths import inside
from backpack_operations.survey import GraphSurvey, edges_behind
from backpack_operations.surveying import look_inside
from backpack_operations.tensor_lists import is_packed


def align(
    alignment: Alignment, survey: GraphSurvey, roots: list[Edge], can_keep_apart: bool
) -> None:
    """Find where the samples lie, and open calls whose rules do not fit.

    Args:
        alignment: The result, which is filled in.
        survey: What is known about the graph.
        roots: The edges that ``backward()`` is called on; in a later walk, those found since.
        can_keep_apart: Whether all propagators can keep samples apart at a tensor without samples.
    """
    alignment.batch_size = survey.batch_size
    survey.sample_ids, survey.guessed, survey.are_moved = {}, set(), None
    tables, owners = set[Call](), Owners(survey)
    if can_keep_apart and (survey.unusual or survey.bare):
        _hand_to_nodes(survey)
        tables = {site.call for site in survey.unusual if _is_table(survey, owners, site)}
        tables -= {call for (call, _), axis in survey.axes.items() if axis}
    _take_for_tables(survey, tables)
    if tables and (data := _lone_tables(survey, roots)):
        tables -= data
        _take_for_tables(survey, tables)
    others = (call for call, _ in survey.received if call not in tables)
    survey.unclear = set(filter(owners.is_unclear, others))
    for key, size in survey.received.items():
        is_moved = owners.are_moved and owners.received_moved(key[0])
        is_other = size != survey.batch_size or _is_declared(survey, key[0])
        is_other |= can_keep_apart and is_packed(key[0])  # as long as the batch by chance
        if key in alignment.faults:
            continue
        if is_other or is_moved:
            alignment.faults[key] = _fault(survey, *key, is_moved)
        elif (refusal := _refusal_of_rows(survey, *key)) is not None:
            alignment.faults[key] = refusal
    if alignment.faults or survey.bare or tables:
        if can_keep_apart:
            _open(survey, [*alignment.faults, *((call, 0) for call in tables)], owners)
            survey.disown_all_of_leaves()
        Walk(survey, alignment, _targets(survey), owners).run(roots)


def _fault(survey: GraphSurvey, call: Call, index: int, is_moved: bool) -> BackpackError:
    """The error that says why a call does not have one row for each sample."""
    first, size = call.stored.inputs[0], survey.batch_size
    received = first.shape[0] if first.dim() else 0
    if survey.is_told:
        return faults.told_rows(call, received, size)
    if received != size:
        runs = [{*other.run.sizes} for other, _ in survey.received]
        if any(run == {received} for run in runs) and any(run == {size} for run in runs):
            return faults.other_run(call, received, size)
        return faults.other_batch(call, received, size)
    axis = declared_axis(call)
    if survey.received[call, index] != size and (axis or not is_moved):
        return faults.moved_batch(call, size, call.stored.outputs[index])
    return faults.turned_batch(call, axis, size)


def _is_declared(survey: GraphSurvey, call: Call) -> bool:
    """Whether a call received samples on a declared axis, although lengths suggest axis 0."""
    if not survey.is_declared or not declared_axis(call):
        return False
    if survey.batch_size == 1:  # any axis fits: the rule is asked whether it finds samples
        return not _accepts(call, 0)
    return survey.is_told or is_doubtful(call.stored.inputs[0].shape, survey.batch_size)


def _hand_to_nodes(survey: GraphSurvey) -> None:
    """Open calls whose parameters are also used by operations inside the call."""
    users = {key: {node for node, _ in bare.edges} for key, bare in survey.bare.items()}
    for site in [*survey.sites.values()] if users else ():
        # A tensor that a call computes inside may be used outside the call, past its output.
        own = survey.trained[site.call]
        used = set().union(*(users.get(id(trained.parameter), ()) for trained in own))
        if used and not used.isdisjoint(inside(site)):
            if site.call in survey.opened:
                survey.disown(site.call)
            else:
                look_inside(survey, site)


def _is_table(survey: GraphSurvey, owners: Owners, site: Site) -> bool:
    """Whether a call's output is taken for a table, as long as the batch by chance.

    ``wpe(torch.arange(T))`` with ``T = N`` is one: the call received nothing of the model's input,
    and its output is small enough to be one for all samples, is computed from buffers, or is added
    to every sample. Or it received as many rows as no samples have, such as the code from which a
    net makes weights. Results are exact even if it is not a table, only slower.
    """
    call = site.call
    if (
        survey.batch_size == 1
        or call.rule.is_loss
        or call.is_released
        or not call.run.sizes
        or call.receives_input
        or not (survey.trained[call] or call in survey.freed)
    ):
        return False
    if any(edge is not None for edge in call.edges) or owners.ids.of_input(call) is not None:
        return False
    rows = max(0, survey.received.get(site[:2], 0))
    is_other = survey.batch_size > 0 and rows % survey.batch_size > 0
    is_other &= survey.depth is None and not survey.is_told  # else samples have rows of any number
    is_small = call.stored.outputs[site.index].nbytes * survey.batch_size <= survey.widest
    return is_other or is_small or is_of_buffers(call) or call in _repeated(survey)


def _repeated(survey: GraphSurvey) -> set[Call]:
    """Calls whose output, or what is computed from it alone, is repeated along a first axis."""

    def further(edge: Edge) -> list[Edge]:
        return behind if len(behind := survey.further(edge)) == 1 else []

    starts = list[Edge]()
    for node, _ in survey.between:
        if nodes.operation_of(node) in nodes.ELEMENTWISE | {"Expand", "Repeat"}:
            whole = nodes.lengths_of(node, 0)
            starts += [edge for _, edge in edges_behind(node) if _is_repeated(edge, whole)]
    sites = map(survey.site_at, reached(starts, further))
    return {site.call for site in sites if site is not None}


def _is_repeated(edge: Edge, whole: tuple[int, ...]) -> bool:
    """Whether an operand lacks the first axis of a result, or has length one there."""
    shape = nodes.lengths_of(edge.node, edge.output_nr)
    return prod(shape) > 1 and (len(shape) < len(whole) or shape[0] < whole[0])


def _take_for_tables(survey: GraphSurvey, calls: Container[Call]) -> None:
    """Note the nodes inside calls that return tables."""
    within = (inside(site) for site in survey.unusual if site.call in calls)
    survey.tables = set().union(*within)


def _lone_tables(survey: GraphSurvey, roots: list[Edge]) -> set[Call]:
    """Calls taken for tables whose outputs reach a loss without meeting any samples.

    They must have received the samples themselves, as ``layer(2 * x)`` does.
    """
    origins, lone = Origins(survey), set[Call]()
    calls = {site.edge.node: site.call for site in survey.unusual}
    losses = [edge for call, _ in survey.received if call.rule.is_loss for edge in call.edges[:1]]
    todo, seen = [edge.node for edge in (*losses, *roots) if edge is not None], set[Node]()
    while todo:
        node = todo.pop()
        is_table = origins.of_tables(node)
        is_pick, lengths = nodes.operation_of(node) in nodes.PICKS, nodes.lengths_of(node, 0)
        if is_table and node in calls:
            lone.add(calls[node])
        if node not in seen and (is_table or is_pick or not lengths):
            seen.add(node)
            todo += children_of(node)
    return lone


def _refusal_of_rows(survey: GraphSurvey, call: Call, index: int) -> BackpackError | None:
    """The rule's error at a call with as many rows as samples, if the call is opened instead.

    That helps with a single sample (a step of a loop, with the time in front), and with rows that
    are single numbers (the indices of bags with offsets).
    """
    if call.rule.is_loss or call.is_released:
        return None
    is_clear = survey.batch_size == 1 or call.stored.inputs[0].dim() == 1
    return _refusal(call, index) if is_clear else None


def _accepts(call: Call, index: int) -> bool:
    """Whether a rule accepts what its call received."""
    return _refusal(call, index) is None


def _refusal(call: Call, index: int) -> BackpackError | None:
    """Why a rule does not fit what its call received, if it does not."""
    if not call.stored.inputs[0].dim():
        return faults.without_axis(call)
    try:
        call.rule.check(View(call, index))
    except BackpackError as error:
        return error
    return None


def _open(survey: GraphSurvey, keys: list[tuple[Call, int]], owners: Owners) -> None:
    """Open calls that did not receive one row for each sample.

    A call stays closed if its rule accepts the rows as if they were samples: its products are then
    regrouped by sample.
    """
    for call, index in keys:
        if call.rule.is_loss or call.is_released:
            continue
        is_trained = bool(survey.trained[call])
        if call in survey.opened:
            survey.disown(call)
        elif (is_trained and owners.received_elsewhere(call)) or not _accepts(call, index):
            look_inside(survey, survey.sites[call, index])


def _targets(survey: GraphSurvey) -> dict[Node, dict[int, Tensor]]:
    """Parameters that are read where operations use them, by the node and position of each use."""
    targets: dict[Node, dict[int, Tensor]] = {}
    if survey.sites:  # else nothing tells how many samples
        for bare in survey.bare_of_models():
            for node, position in bare.edges:
                targets.setdefault(node, {})[position] = bare.parameter
    return targets
