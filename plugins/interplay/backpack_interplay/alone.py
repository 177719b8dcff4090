"""A backward pass without autograd, for extensions that need no gradient.

Curvature reads what rules send. Autograd's own pass would only tell in which order to visit calls,
and the graph tells that as well; the gradients of activations would be computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import LeafNode, Node
from backpack_core.contract.observer import Options
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.schedule import RankSchedule
from backpack_core.graph import nodes
from backpack_core.graph.order import ranks
from backpack_core.record.call import Site
from backpack_core.values import without_autocast
from backpack_interplay.gradient import WithoutGradients, leaves_to_narrow


class Skipped(WithoutGradients):
    """Visits every call in an order of its own, if nobody needs a gradient."""

    def instead(
        self, run: BackwardPass, given: Options, gradients: Sequence[Tensor | None]
    ) -> bool:
        """Do that, if it may be."""
        return carry_all(run, given, gradients)


def carry_all(found: BackwardPass, options: Options, gradients: Sequence[Tensor | None]) -> bool:
    """Visit every call, and say whether that was done, so that autograd need not go.

    Args:
        found: The pass, before autograd has begun.
        options: The arguments of ``backward()``.
        gradients: What comes in at each root.
    """
    order = _order(found, options)
    if order is None:
        return False
    (gradient,) = gradients
    found.is_running = found.is_alone = True
    schedule: Any = RankSchedule(found.survey, found.groups, order)
    found.schedule = found.traversal.schedule = schedule

    def visit(site: Site) -> None:
        found.visit(site, gradient if site.call.rule.is_loss else None, None)

    with torch.no_grad(), without_autocast():
        for site in found.survey.sites.values():  # nothing sent there is an error
            schedule.await_site(site)
        schedule.run(visit)
    return True


def _order(found: BackwardPass, options: Options) -> dict[Node, int] | None:
    """The place of every node in that order; ``None`` if autograd has to run.

    It has to if somebody reads a gradient (a propagator, the dye, a parameter without quantities, a
    hook that gathers shards), if anything but a single loss is differentiated, and if Python
    functions are in the graph: only autograd knows which gradients they leave undefined.
    """
    survey, context, groups = found.survey, found.context, found.groups
    if not found.is_outermost or not groups:
        return None
    readers = context.graph_extensions, context.beside
    if any(observer.needs_autograd for observer in found.observers):
        return None
    apart = survey.alignment.starts, survey.leaves, survey.bare, survey.shards
    if any(readers) or any(apart) or options.get("create_graph"):
        return None
    if any(group.propagator.needs_gradient or group.has_overrides for group in groups):
        return None
    site = survey.site_at(found.roots[0])
    losses = [call for call, _ in survey.sites if call.rule.is_loss]
    if site is None or len(found.roots) > 1 or losses != [site.call]:
        return None
    if site.call.stored.outputs[site.index].numel() != 1:
        return None
    if any(nodes.is_function(node) and not nodes.hands_on(node) for node, _ in survey.seen):
        return None
    is_distributed = any(call.run.is_distributed for call in survey.trained)
    if is_distributed or leaves_to_narrow(survey, options, found.roots) is None:
        return None
    order = ranks(site.edge.node)
    leaves = (node for node in order if isinstance(node, LeafNode))
    return order if all(survey.is_read(leaf.variable) for leaf in leaves) else None
