"""Finds out where the samples lie in a graph, and which parts need more than their layer rules.

Most graphs have samples on axis 0 everywhere, which is quickly seen. See
``docs/design/samples.md``.
"""

from __future__ import annotations

from torch import Tensor

from backpack_core._torch import Node, has_memory, memory_of
from backpack_core.errors import BackpackError
from backpack_core.graph import faults
from backpack_core.graph.alignment import Alignment
from backpack_core.graph.alignment_walk import Walk
from backpack_core.graph.batch import declared_axis, is_doubtful
from backpack_core.graph.of_weights import has_parameters_given
from backpack_core.graph.paths import inside
from backpack_core.graph.survey import Survey
from backpack_core.graph.surveying import look_inside
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.owner import owned_by_models, owner_of
from backpack_core.record.view import View


def align(alignment: Alignment, survey: Survey, roots: list[Edge], can_keep_apart: bool) -> None:
    """Find out where the samples lie, and have calls gone through whose rules do not fit.

    Args:
        alignment: The result, which is filled in.
        survey: What is known about the graph.
        roots: What ``backward()`` is called on; in a later walk, what was found since.
        can_keep_apart: Whether all propagators can keep samples apart at a tensor without samples.
    """
    alignment.batch_size, alignment.is_readable = survey.batch_size, survey.is_readable
    for place, size in survey.received.items():
        is_other = size != survey.batch_size or _is_declared(survey, place[0])
        if is_other and place not in alignment.faults:
            fault = _fault(survey, *place)
            if fault is not None:
                alignment.faults[place] = fault
    for site in [*survey.sites.values()] if survey.freed else ():
        if site.call in survey.freed and site.call not in survey.opened:
            look_inside(survey, site)
    tables: set[Call] = set()
    if can_keep_apart and (survey.unusual or survey.bare):
        _hand_to_nodes(survey)
        tables = {site.call for site in survey.unusual if _is_table(survey, site)}
        tables -= {call for (call, _), axis in survey.axes.items() if axis}
    if alignment.faults or survey.bare or tables:
        if can_keep_apart:
            _open(survey, [*alignment.faults, *((call, 0) for call in tables)])
            survey.disown_all_of_leaves()
        within = (inside(site) for site in survey.unusual if site.call in tables)
        Walk(survey, alignment, set().union(*within), _targets(survey)).run(roots)


def _fault(survey: Survey, call: Call, index: int) -> BackpackError | None:
    """Why a call has its samples elsewhere than other calls; ``None`` if it has not."""
    stored, size = call.stored, survey.batch_size
    output, inputs = stored.outputs[index], stored.inputs
    if not inputs:
        return faults.without_inputs(call) if survey.trained[call] else None
    axis = survey.axes[call, index]
    received = inputs[0].shape[0] if inputs[0].dim() else 0
    if received != size:
        return faults.other_batch(call, received, size)
    is_loss = call.rule.is_loss or output.dim() == 0
    if not is_loss and (axis >= output.dim() or output.shape[axis] != size):
        return faults.moved_batch(call, size, output)
    if _is_declared(survey, call):
        return faults.declared_batch(call, declared_axis(call), size)
    return None


def _is_declared(survey: Survey, call: Call) -> bool:
    """Whether only the declaration says that a call received its samples on another axis."""
    if not survey.is_declared or not declared_axis(call) or not call.stored.inputs:
        return False
    if survey.batch_size == 1:  # the rule may look for samples on axis 0 all the same
        return not _is_willing(call, 0)
    return is_doubtful(call.stored.inputs[0].shape, survey.batch_size)


def _hand_to_nodes(survey: Survey) -> None:
    """Look at some parameters where operations use them, instead of at a call.

    A call that was given a parameter as an argument does not own it.
    """
    for site in [*survey.unusual]:
        call = site.call
        if call.rule.is_loss or call.is_released or call in survey.opened:
            continue
        if has_parameters_given(call):
            look_inside(survey, site)
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


def _is_table(survey: Survey, site: Site) -> bool:
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
    if any(edge is not None for edge in call.edges):
        return False
    is_small = call.stored.outputs[site.index].nbytes * survey.batch_size <= survey.widest
    return is_small or _is_of_buffers(call)


def _is_of_buffers(call: Call) -> bool:
    """Whether a call received only buffers of the model, as a net of coordinates does."""
    memories = set(map(memory_of, filter(has_memory, owner_of(call.module).buffers())))
    return bool(memories) and all(memory_of(t) in memories for t in call.stored.inputs)


def _is_willing(call: Call, index: int) -> bool:
    """Whether a rule accepts what its call received, which may have no batch at all."""
    try:
        call.rule.check(View(call, index))
    except BackpackError:
        return False
    return True


def _open(survey: Survey, places: list[tuple[Call, int]]) -> None:
    """Handle calls that received something without samples: go through them, node by node.

    Not if the rule takes what it received for samples: the products it gives are then added up.
    """
    for call, index in places:
        if call.rule.is_loss or call.is_released or not survey.trained[call]:
            continue
        if call in survey.opened:
            survey.disown(call)
        elif not _is_willing(call, index):
            look_inside(survey, survey.sites[call, index])


def _targets(survey: Survey) -> dict[tuple[Node, int], Tensor]:
    """Parameters of extended models that no call reads, by the edge that leads to each."""
    if not survey.bare or not survey.sites:  # of no call, nothing tells how many samples
        return {}
    # Of those that calls use, some may have been replaced in their module since.
    own = owned_by_models().keys() | survey.uses.keys()
    bare = [bare for key, bare in survey.bare.items() if key in own]
    return {edge: one.parameter for one in bare for edge in one.edges}
