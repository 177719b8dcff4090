"""A backward pass without autograd, for extensions that need no gradient.

Curvature reads what rules send. Autograd's own pass would only tell in which order to visit calls,
and the graph tells that as well; the gradients of activations would be computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backpack_core._torch import LeafNode, Node
from backpack_core.contract.observer import Options
from backpack_core.engine.backward import BackwardPass
from backpack_interplay.gradient import WithoutGradients, leaves_to_narrow
from backpack_operations.order import ranks
from backpack_operations.own_order import visit_all


class Skipped(WithoutGradients):
    """Visits every call in an order of its own, if nobody needs a gradient."""

    def instead(
        self, run: BackwardPass, given: Options, gradients: Sequence[Tensor | None]
    ) -> bool:
        """Do that, if it may be."""
        order = _order(run, given)
        if order is not None:
            visit_all(run, order, *gradients)
        return order is not None


def _order(found: BackwardPass, options: Options) -> dict[Node, int] | None:
    """The place of every node in that order; ``None`` if autograd has to run.

    It has to if somebody reads a gradient (a propagator, the dye, a parameter without quantities, a
    hook that gathers shards), if anything but a single loss is differentiated, and if Python
    functions are in the graph: only autograd knows which gradients they leave undefined.
    """
    survey, context, groups = found.survey, found.context, found.groups
    if not found.is_outermost or not groups:
        return None
    readers = context.beside, *[observer.needs_autograd for observer in found.observers]
    is_needed = found.between.needs_autograd or survey.shards
    if any(readers) or is_needed or options.get("create_graph"):
        return None
    if any(group.propagator.needs_gradient or group.has_overrides for group in groups):
        return None
    site = survey.site_at(found.roots[0])
    losses = [call for call, _ in survey.sites if call.rule.is_loss]
    if site is None or len(found.roots) > 1 or losses != [site.call]:
        return None
    if site.call.stored.outputs[site.index].numel() != 1:
        return None
    is_distributed = any(call.run.is_distributed for call in survey.trained)
    if is_distributed or leaves_to_narrow(survey, options, found.roots) is None:
        return None
    order, read = ranks(site.edge.node), survey.parameters()
    leaves = (node for node in order if isinstance(node, LeafNode))
    return order if all(id(leaf.variable) in read for leaf in leaves) else None
