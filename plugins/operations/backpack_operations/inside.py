"""Parameters deep inside of a module, read when autograd brings their gradient.

First-order extensions read a projection of attention from the gradient at that projection. A rule
could carry the gradient at the output back to it, which would repeat a part of the backward pass.
Or it says where autograd brings that gradient anyway (``LayerRule.node_inside``), and reads
``view.inner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from backpack_core._torch import current_node, will_execute
from backpack_core.contract.carrier import Carrier
from backpack_core.engine.active import current
from backpack_core.engine.location import place
from backpack_core.engine.schedule import HookSchedule, when_reached
from backpack_core.graph.parameters import Trained
from backpack_core.record.view import View

if TYPE_CHECKING:
    from backpack_operations.visits import GraphTraversal  # which calls this

# The arguments of ``GraphTraversal.read``, for a reading that waits.
Later = tuple[int, View, Carrier, Any, Sequence[Trained]]


def read_here(
    traversal: GraphTraversal, lane: int, view: View, carrier: Carrier, quantity: Any
) -> Sequence[Trained]:
    """The parameters to read at the output now; the others are read when their gradient arrives."""
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
        or context.extension_hook is not None  # it has to see everything that is read at a module
    ):
        return trained
    node = rule.node_inside(view)
    if node is None or not will_execute(node):
        return trained
    when_reached(node, traversal, _reach, schedule)
    traversal.inside.setdefault(node, []).append((lane, view, carrier, quantity, later))
    return [use for use in trained if use not in later]


def _reach(traversal: GraphTraversal, grads: Sequence[Tensor | None]) -> None:
    for lane, view, *what in traversal.inside.pop(current_node(), ()):
        view.inner, view.counted = grads[0], None
        try:
            traversal.read(lane, view, *what)
        except Exception as error:
            place(error, view, traversal.groups[lane].first)
            raise
