"""Finds out where the samples lie in a graph, and which parts need more than their layer rules.

Most graphs have samples on axis 0 everywhere, which is quickly seen. See
``docs/design/operations.md``.
"""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.view import View
from backpack_operations import faults, nodes
from backpack_operations.alignment import Alignment
from backpack_operations.alignment_walk import Walk
from backpack_operations.batch import declared_axis, is_doubtful
from backpack_operations.of_weights import Origins
from backpack_operations.order import children_of
from backpack_operations.owners import Owners, is_of_buffers
from backpack_operations.paths import inside
from backpack_operations.survey import GraphSurvey
from backpack_operations.surveying import look_inside


def align(
    alignment: Alignment, survey: GraphSurvey, roots: list[Edge], can_keep_apart: bool
) -> None:
    """Find out where the samples lie, and have calls gone through whose rules do not fit.

    Args:
        alignment: The result, which is filled in.
        survey: What is known about the graph.
        roots: What ``backward()`` is called on; in a later walk, what was found since.
        can_keep_apart: Whether all propagators can keep samples apart at a tensor without samples.
    """
    alignment.batch_size = survey.batch_size
    survey.numbers, survey.are_moved = {}, None
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
    for place, size in survey.received.items():
        is_moved = owners.are_moved and owners.received_moved(place[0])
        is_other = size != survey.batch_size or _is_declared(survey, place[0])
        if place in alignment.faults:
            continue
        if is_other or is_moved:
            alignment.faults[place] = _fault(survey, *place, is_moved)
        elif (refusal := _refusal_of_rows(survey, *place)) is not None:
            alignment.faults[place] = refusal
    if alignment.faults or survey.bare or tables:
        if can_keep_apart:
            _open(survey, [*alignment.faults, *((call, 0) for call in tables)], owners)
            survey.disown_all_of_leaves()
        Walk(survey, alignment, _targets(survey), owners).run(roots)


def _fault(survey: GraphSurvey, call: Call, index: int, is_moved: bool) -> BackpackError:
    """Why a call has its samples elsewhere than other calls."""
    first, size = call.stored.inputs[0], survey.batch_size
    received = first.shape[0] if first.dim() else 0
    if survey.is_told:
        return faults.told_rows(call, received, size)
    if received != size:
        return faults.other_batch(call, received, size)
    axis = declared_axis(call)
    if survey.received[call, index] != size and (axis or not is_moved):
        return faults.moved_batch(call, size, call.stored.outputs[index])
    return faults.turned_batch(call, axis, size)


def _is_declared(survey: GraphSurvey, call: Call) -> bool:
    """Whether only the declaration says that a call received its samples on another axis."""
    if not survey.is_declared or not declared_axis(call):
        return False
    if survey.batch_size == 1:  # the rule may look for samples on axis 0 all the same
        return not _is_willing(call, 0)
    return survey.is_told or is_doubtful(call.stored.inputs[0].shape, survey.batch_size)


def _hand_to_nodes(survey: GraphSurvey) -> None:
    """Look at parameters where operations use them, if some of these are inside of the call."""
    users = {key: {node for node, _ in bare.edges} for key, bare in survey.bare.items()}
    for site in [*survey.sites.values()] if users else ():
        # What a call computes inside may be used outside of it, past its output.
        own = survey.trained[site.call]
        used = set().union(*(users.get(id(trained.parameter), ()) for trained in own))
        if used and not used.isdisjoint(inside(site)):
            if site.call in survey.opened:
                survey.disown(site.call)
            else:
                look_inside(survey, site)


def _is_table(survey: GraphSurvey, owners: Owners, site: Site) -> bool:
    """Whether a call's output is taken for a table, which is as long as the batch by chance.

    As of ``wpe(torch.arange(T))``: the call received nothing of the model's input, and its output
    is small enough to be one for all samples, or is computed from buffers. To take it for a table
    is exact in any case.
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
    if any(edge is not None for edge in call.edges) or owners.of_input(call) is not None:
        return False
    is_small = call.stored.outputs[site.index].nbytes * survey.batch_size <= survey.widest
    return is_small or is_of_buffers(call)


def _take_for_tables(survey: GraphSurvey, calls: Container[Call]) -> None:
    within = (inside(site) for site in survey.unusual if site.call in calls)
    survey.tables = set().union(*within)


def _lone_tables(survey: GraphSurvey, roots: list[Edge]) -> set[Call]:
    """Calls taken for tables of which something reaches a loss without meeting any samples.

    They received the samples then, as ``layer(2 * x)``: nothing else has brought any.
    """
    origins, found = Origins(survey), set[Call]()
    known = {site.edge.node: site.call for site in survey.unusual}
    losses = [edge for call, _ in survey.received if call.rule.is_loss for edge in call.edges[:1]]
    todo, seen = [edge.node for edge in (*losses, *roots) if edge is not None], set[Node]()
    while todo:
        node = todo.pop()
        is_table = origins.of_tables(node)
        is_pick, lengths = nodes.operation_of(node) in nodes.PICKS, nodes.lengths_of(node, 0)
        if is_table and node in known:
            found.add(known[node])
        if node not in seen and (is_table or is_pick or not lengths):
            seen.add(node)
            todo += children_of(node)
    return found


def _refusal_of_rows(survey: GraphSurvey, call: Call, index: int) -> BackpackError | None:
    """What a rule says of as many rows as samples, if it need not be asked: nodes know as much.

    That is so of a single sample (a step of a loop, with the time in front), and of rows that are
    single numbers (the indices of bags with offsets).
    """
    if call.rule.is_loss or call.is_released or not survey.trained[call]:
        return None
    is_clear = survey.batch_size == 1 or call.stored.inputs[0].dim() == 1
    return _refusal(call, index) if is_clear else None


def _is_willing(call: Call, index: int) -> bool:
    """Whether a rule accepts what its call received, which may have no batch at all."""
    return _refusal(call, index) is None


def _refusal(call: Call, index: int) -> BackpackError | None:
    try:
        call.rule.check(View(call, index))
    except BackpackError as error:
        return error
    return None


def _open(survey: GraphSurvey, places: list[tuple[Call, int]], owners: Owners) -> None:
    """Handle calls that received something without samples: go through them, node by node.

    Not if the rule takes what it received for samples: the products it gives are then added up.
    """
    for call, index in places:
        if call.rule.is_loss or call.is_released or not survey.trained[call]:
            continue
        if call in survey.opened:
            survey.disown(call)
        elif owners.received_elsewhere(call) or not _is_willing(call, index):
            look_inside(survey, survey.sites[call, index])


def _targets(survey: GraphSurvey) -> dict[Node, dict[int, Tensor]]:
    """Parameters of extended models that no call reads, by the node and position of each use."""
    found: dict[Node, dict[int, Tensor]] = {}
    if survey.sites:  # else nothing tells how many samples
        for bare in survey.bare_of_models():
            for node, position in bare.edges:
                found.setdefault(node, {})[position] = bare.parameter
    return found
