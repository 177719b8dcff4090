"""Parameters inside a module that are read when autograd computes a gradient there.

For example, first-order extensions read an attention projection from the gradient at that
projection. A rule could carry the gradient at the module's output back to it, which would repeat a
part of the backward pass. Instead, ``LayerRule.node_inside`` names the node at which autograd
computes this gradient anyway, and the rule then reads it as ``view.inner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from backpack_core._torch import Node, current_node, will_execute
from backpack_core.engine.active import current
from backpack_core.engine.location import place
from backpack_core.graph import Trained
from backpack_core.record.view import View
from backpack_operations.schedule import HookSchedule, when_reached

if TYPE_CHECKING:
    from backpack_operations.visits import GraphTraversal  # which imports this file

# The arguments of ``GraphTraversal.read``, for parameters that are read later.
Later = tuple[int, View, Any, Any, Sequence[Trained]]


def read_here(
    traversal: GraphTraversal, lane: int, view: View, carrier: Any, quantity: Any
) -> Sequence[Trained]:
    """The parameters to read at the call's output now; a hook is set to read the others later."""
    survey, schedule, rule = traversal.survey, traversal.schedule, view.call.rule
    trained, context = survey.trained[view.call], current(view.call.thread)
    later = [use for use in trained if use.name in rule.reads_inside]
    if (
        not later
        or not isinstance(schedule, HookSchedule)
        or traversal.groups[lane].propagator.travels
        or carrier.gives_values
        or view.is_differentiable
        or view.indices is not None
        or view.positions != 1
        or survey.alignment.owned
        or context is None
        or context.extension_hook
        is not None  # it is called when all parameters of a module are read
    ):
        return trained
    node = rule.node_inside(view)
    if node is None or not will_execute(node):
        return trained
    when_reached(node, traversal, _reach, schedule)
    traversal.inside.setdefault(node, []).append((lane, view, carrier, quantity, later))
    return [use for use in trained if use.name not in rule.reads_inside]


def _reach(traversal: GraphTraversal, grads: Sequence[Tensor | None]) -> None:
    between: Any = traversal.schedule.between
    between.read_inside(traversal, current_node(), grads)


def read_inside(traversal: GraphTraversal, node: Node, grads: Sequence[Tensor | None]) -> None:
    """Read the parameters that wait for the node that autograd has reached."""
    for lane, view, *rest in traversal.inside.pop(node, ()):
        view.inner, view.counted = grads[0], None
        try:
            traversal.read(lane, view, *rest)
        except Exception as error:
            place(error, view, traversal.groups[lane].first)
            raise
