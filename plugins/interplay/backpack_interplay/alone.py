"""Backward passes without autograd (``gradient="skipped"``), for extensions that need no gradient.

Curvature is read from columns that rules send. Autograd would only give the order of the visits,
which the graph gives as well, and would compute gradients of activations in vain.
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
    """Visits every call in an order of our own, if nothing needs a gradient."""

    def instead(
        self, run: BackwardPass, given: Options, gradients: Sequence[Tensor | None]
    ) -> bool:
        """Visit every call without autograd, if that is possible; returns whether it was."""
        order = _order(run, given)
        if order is not None:
            visit_all(run, order, *gradients)
        return order is not None


def _order(run: BackwardPass, options: Options) -> dict[Node, int] | None:
    """The number of every node in the order; ``None`` if autograd has to run.

    It has to run if something needs a gradient (a propagator, the dye, a parameter without
    quantities, a hook that gathers shards), if anything but a single loss is differentiated, or if
    the graph has Python functions: only autograd knows which gradients they leave undefined.
    """
    survey, context, groups = run.survey, run.context, run.groups
    if not run.is_outermost or not groups:
        return None
    readers = context.beside, *[observer.needs_autograd for observer in run.observers]
    is_needed = run.between.needs_autograd or survey.shards
    if any(readers) or is_needed or options.get("create_graph"):
        return None
    if any(group.propagator.needs_gradient or group.has_overrides for group in groups):
        return None
    site = survey.site_at(run.roots[0])
    losses = [call for call, _ in survey.sites if call.rule.is_loss]
    if site is None or len(run.roots) > 1 or losses != [site.call]:
        return None
    if site.call.stored.outputs[site.index].numel() != 1:
        return None
    is_distributed = any(call.run.is_distributed for call in survey.trained)
    if is_distributed or leaves_to_narrow(survey, options, run.roots) is None:
        return None
    order, parameters = ranks(site.edge.node), survey.parameters()
    leaves = (node for node in order if isinstance(node, LeafNode))
    return order if all(id(leaf.variable) in parameters for leaf in leaves) else None
