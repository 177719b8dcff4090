"""Walks the graph of a backward pass before anything is computed, and fills in the survey.

The walk steps over calls that have a rule, so it costs one step per call and per node between
calls. It enters calls without a rule. It then carries along the calls that it is inside of,
innermost first (the *region*), so that a parameter used there is known to be that call's.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable

from torch import Tensor

from backpack_core._torch import Node, has_memory
from backpack_core.graph import described, is_leaf
from backpack_core.record.call import Call, Edge, Site
from backpack_core.record.view import View
from backpack_operations import faults, nodes
from backpack_operations.batch import batch_of, declared_axis, other_run, some_rows
from backpack_operations.of_weights import has_parameters_given
from backpack_operations.parts import tell_parts
from backpack_operations.paths import losses_without_rule
from backpack_operations.summed import told_by_sums
from backpack_operations.survey import GraphSurvey, Region, edges_behind
from backpack_operations.viewed import below, has_call, site_at, viewed_at
from backpack_products.substitutes import is_parameter

_Steps = list[tuple[Edge, Region]]  # where the walk goes on


def look_behind(survey: GraphSurvey, edges: Iterable[Edge]) -> None:
    """Walk everything behind some edges that was not walked before, and count the samples."""
    edges = [*edges]
    _walk(survey, [(edge, ()) for edge in edges])
    for output in survey.computed_from.keys() & survey.viewed.keys():
        survey.faults.append((faults.changed_output(survey.computed_from[output]), None))
    if not survey.batch_size:
        survey.unruled_losses |= losses_without_rule(survey, edges)
        if survey.told is None:
            survey.told = told_by_sums(survey, edges)
        else:
            survey.fit_told()
    if survey.told is not None:
        survey.batch_size = survey.told.samples
    elif not survey.batch_size:
        survey.batch_size, survey.call_rows = some_rows(survey)
        if not survey.batch_size:
            survey.batch_size = batch_of(survey)
            tell_parts(survey)
        if (other := other_run(survey)) is not None:
            survey.faults.append((faults.other_run(*other, survey.batch_size), None))


def look_inside(survey: GraphSurvey, site: Site) -> None:
    """Open a call that has a rule: quantities cross the nodes inside instead."""
    survey.axes.update((key, 0) for key in survey.axes if key[0] is site.call)
    # Each output of a call has operations behind it that the others may lack.
    for output in [other for other in survey.sites.values() if other.call is site.call]:
        _walk(survey, _open(survey, output, survey.regions[site.call]))


def _open(survey: GraphSurvey, site: Site, region: Region) -> _Steps:
    """Read nothing at a call itself; returns where the nodes inside it begin."""
    call = site.call
    survey.opened.add(call)
    survey.disown(call)
    survey.computed[call] = ChainMap(_computed(call), survey.handed)
    return [(below(site), (call, *region))]


def _walk(survey: GraphSurvey, todo: _Steps) -> None:
    survey.structure = None
    while todo:
        edge, region = todo.pop()
        if survey.beside and edge[:2] in survey.beside:
            continue
        if region:
            if edge[:2] in survey.computed[region[0]]:
                continue
            while region and any(e and e[:2] == edge[:2] for e in region[0].edges):
                region = region[1:]  # an input of the innermost call: the walk leaves that call
        site = None
        if has_call(edge.node):
            _note_views(survey, edge, region)
            site = survey.site_at(edge)
        if site is None:
            todo += _pass(survey, edge.node, region)
        else:
            todo += _enter(survey, site, region)


def _computed(call: Call) -> dict[tuple[Node, int], Tensor]:
    """The parameters of a call that users computed in the graph, by the output of a node.

    ``functional_call`` can hand over such tensors. They get results as leaves do. What the module
    itself computes, as by a parametrization, is crossed instead: results are those of its leaves.
    """
    stored = call.stored
    used = (stored.owned[name][0] for name in stored.parameters if name not in stored.computed)
    return {(node, t.output_nr): t for t in used if (node := t.grad_fn) is not None}


# Calls ------------------------------------------------------------------------------------------


def _enter(survey: GraphSurvey, site: Site, region: Region) -> _Steps:
    """Record a call; returns where the walk goes on: at its inputs, or inside it."""
    call, index = site.call, site.index
    if (call, index) in survey.sites or call.is_released:
        return []
    survey.sites[call, index] = site
    survey.regions[call] = region
    survey.note_uses(call)
    _check(survey, site)
    # The rule cannot be used if it does not cover a trained parameter, if the call received no
    # input (so that no samples are known), or if it received a parameter as an argument.
    is_uncovered = call in survey.freed or not call.edges
    is_given = has_parameters_given(call) or any(
        e is not None and e[:2] in survey.handed for e in call.edges
    )
    if call.rule.transparent:  # its parameters may be read at the call all the same
        survey.opened.add(call)
        survey.computed[call] = ChainMap(_computed(call), survey.handed)
        return [(below(site), (call, *region))]
    # Nor if the number of rows changes: only the operations inside tell which samples they are.
    is_resized = survey.received.get((call, index)) == -1 and not survey.trained[call]
    if call.is_rewired or is_uncovered or is_resized or (is_given and not call.rule.is_loss):
        survey.axes[call, index] = 0
        return _open(survey, site, region)
    return [(edge, region) for edge in call.edges if edge is not None]


def _check(survey: GraphSurvey, site: Site) -> None:
    """Record shapes and the sample axis at a call; raise, or record a fault, if it has no rows."""
    call, index = site.call, site.index
    rule, stored, module = call.rule, call.stored, call.module
    output, inputs = stored.outputs[index], stored.inputs
    for tensor in (output, *inputs):
        if not has_memory(tensor):
            raise faults.nested_tensor(f"What {call.path} received or returned")
        survey.widest = max(survey.widest, tensor.nbytes)
    view = View(call, index)
    turned = _turned_axis(survey, view) if inputs else 0
    survey.axes[call, index] = axis = (0 if index else turned) or rule.batch_axis(view, index)
    if not isinstance(axis, int) or not 0 <= axis < max(1, output.dim()):
        raise faults.no_axis(call, axis, output)
    survey.is_declared |= declared_axis(call) > 0
    if rule.mixes_samples(view):
        further = " If axis 0 holds other things (weights, steps), call a function, not the module."
        survey.faults.append((faults.mixing(call.path, further), None))
    if inputs:
        size = inputs[0].shape[turned] if inputs[0].dim() else 0
        is_resized = bool(output.dim()) and output.shape[axis : axis + 1] != (size,)
        survey.received[call, index] = -1 if is_resized and not rule.is_loss else size
    if module._modules and not rule.transparent and (fault := faults.uncovered(call)):
        raise fault
    if module._modules or None in call.edges:
        survey.unusual.append(site)


def _turned_axis(survey: GraphSurvey, view: View) -> int:
    """The axis other than 0 on which a rule takes samples, if it is plain that they are there.

    Not for some samples, nor for other quantities than columns: operations inside serve these.
    """
    axis, call = view.call.rule.input_axis(view), view.call
    is_plain = call.edges[0] is not None or declared_axis(call) == axis
    return axis if survey.shows_all and is_plain else 0


# Nodes ------------------------------------------------------------------------------------------


def _pass(survey: GraphSurvey, node: Node, region: Region) -> _Steps:
    """Record a node between calls; returns where the walk goes on."""
    # A node may be reached in two regions: from inside of a call, and past the call's output.
    if (node, region) in survey.between:
        return []
    survey.between[node, region] = None
    further: _Steps = []
    if nodes.is_nested(node):
        raise faults.nested_tensor(f"What the operation {described(node)!r} made", node)
    if option := nodes.option_of_gradients(node):
        raise faults.other_gradients(node, option)
    if nodes.mixes_samples(node):
        what = f"The operation {described(node)!r}"
        survey.faults.append((faults.mixing(what), node))
    for position, edge in edges_behind(node):
        if is_leaf(edge.node):
            _note_leaf(survey, edge.node.variable, node, position, region)  # type: ignore[attr-defined]
            continue
        given = (survey.computed[region[0]] if region else survey.handed).get(edge[:2])
        if given is not None:
            _note_leaf(survey, given, node, position, region)
            continue
        if edge.level:
            _see_through(survey, edge)
            edge = Edge(edge.node, edge.output_nr)
        if region:
            _note_use_inside(survey, edge, node, region)
        further.append((edge, region))
    return further


def _note_leaf(
    survey: GraphSurvey, leaf: Tensor, node: Node, position: int, region: Region
) -> None:
    """Record a parameter that a node uses, with the enclosing call that owns it, if any."""
    for call in region:
        if any(leaf is own.parameter for own in survey.trained[call]):
            survey.uses_inside.setdefault(call, []).append((node, position, leaf))
            return
        if any(leaf is own.parameter for own in survey.freed.get(call, ())):
            break
    else:
        survey.outside.add(id(leaf))
    use = survey.uses.get(id(leaf))
    if is_parameter(leaf) if use is None else use.is_wanted:
        survey.note_bare(node, position, leaf)


# Views that were changed in place -----------------------------------------------------------------
# Autograd then reaches the base of the view, and never the node whose output the call returned.


def _note_views(survey: GraphSurvey, edge: Edge, region: Region) -> None:
    """Record the views of a node's output that calls returned, if the base is reached past them."""
    output = (edge.node, edge.output_nr)
    views = () if edge.level or output in survey.viewed else viewed_at(*output)
    for level, (call, _, layout) in reversed([*enumerate(views, start=1)]):
        if layout.is_whole and not call.is_released and call not in region:
            _see_through(survey, Edge(*output, level))
            break


def _see_through(survey: GraphSurvey, edge: Edge) -> None:
    """Have the calls that returned views, up to the level of the edge, visited at their base."""
    survey.viewed[edge.node, edge.output_nr] = edge
    for level in range(1, edge.level + 1):
        site = site_at(Edge(edge.node, edge.output_nr, level))
        if site is not None:
            survey.at_base.add((site.call, site.index))
            if (site.call, site.index) in survey.sites:
                survey.sites[site.call, site.index] = site


def _note_use_inside(survey: GraphSurvey, edge: Edge, node: Node, region: Region) -> None:
    """Record a tensor inside of a call from which it computes more after returning a view of it."""
    for call, *_ in viewed_at(edge.node, edge.output_nr):
        own = site_at(Edge(node, 0))
        if call in region and (own is None or own.call is not call):
            survey.computed_from.setdefault((edge.node, edge.output_nr), call)
