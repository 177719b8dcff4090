"""Backward passes without autograd (``gradient="skipped"``), for extensions that need no gradient.

Curvature is read from columns that rules send. Autograd would only give the order of the visits,
which the graph also gives. It would compute gradients of activations for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from backpack_core._torch import LeafNode, Node
from backpack_core.autocast import without_autocast
from backpack_core.engine.backward import BackwardPass
from backpack_core.record.call import Site
from backpack_interplay.gradient import WithoutGradients, leaves_to_narrow
from backpack_operations.bridge import push_through
from backpack_operations.nodes import NodeOutput
from backpack_operations.order import children_of, consumers_first, ranks
from backpack_operations.own_order import drive_all, visit_all
from backpack_operations.passes import GraphPass
from backpack_operations.plan import Planned
from backpack_operations.structure import Structure


class Skipped(WithoutGradients):
    """Visits every call in this library's own order, if nothing needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._planned: Planned | None = None
        self._at_losses: dict[NodeOutput, Tensor] | None = None

    def goes_alone(self, run: BackwardPass, planned: Planned, structure: Structure) -> bool:
        """Whether earlier passes of this structure could, and this one reads no gradients."""
        self._planned = planned
        if planned.kept.get(Skipped) and not _reads_gradients(run):
            self._at_losses = _at_losses(run, structure.sites.values())
        self.needs_survey = self._at_losses is None
        return not self.needs_survey

    def instead(self, run: BackwardPass) -> bool:
        """Visit every call without autograd, if that is possible; returns whether it was."""
        if not isinstance(run, GraphPass):
            return False  # core alone has no order of its own
        if run.traversal is None:
            if self._at_losses is not None:
                drive_all(run, self._at_losses)
            return self._at_losses is not None
        if _reads_gradients(run):
            return False
        order = _order(run)
        at_losses = None if order is None else _at_losses(run, run.survey.sites.values())
        if self._planned is not None:
            self._planned.kept[Skipped] = at_losses is not None
        if order is not None and at_losses is not None:
            visit_all(run, order, at_losses)
        return at_losses is not None


def _reads_gradients(run: BackwardPass) -> bool:
    """Whether something reads gradients in this pass, whatever the structure of its graph."""
    readers = run.context.beside, *[observer.needs_autograd for observer in run.observers]
    is_plain = run.is_outermost and run.may_narrow
    return not is_plain or any(readers) or bool(run.arguments.options.get("create_graph"))


def _order(run: GraphPass) -> dict[Node, int] | None:
    """The number of every node in the order; ``None`` if autograd must run.

    It must run if something needs a gradient (a propagator, a parameter without quantities, a hook
    that gathers shards), or if the graph has Python functions: only autograd knows which gradients
    they leave undefined.
    """
    survey, groups = run.survey, run.groups
    if not groups or run.between.needs_autograd or survey.shards:
        return None
    if any(group.propagator.needs_gradient or group.has_overrides for group in groups):
        return None
    is_distributed = any(call.run.is_distributed for call in survey.trained)
    if is_distributed or leaves_to_narrow(survey, run.arguments.options, run.roots) is None:
        return None
    order, parameters = ranks(*[edge.node for edge in run.roots]), survey.parameters()
    leaves = (node for node in order if isinstance(node, LeafNode))
    return order if all(id(leaf.variable) in parameters for leaf in leaves) else None


def _at_losses(run: BackwardPass, sites: Iterable[Site]) -> dict[NodeOutput, Tensor] | None:
    """The gradient at each loss, through the operations in front of it; ``None`` if one has none.

    Args:
        run: The pass.
        sites: Every output of a call in its graph.
    """
    losses = {site.edge[:2] for site in sites if site.call.rule.is_loss}
    ends, starts = {node for node, _ in losses}, dict[NodeOutput, Tensor]()
    for (node, output_nr, _), gradient in zip(run.roots, run.gradients, strict=True):
        if gradient is None or (node, output_nr) in starts:
            return None
        starts[node, output_nr] = gradient.unsqueeze(0)
    roots = [edge.node for edge in run.roots]
    before = consumers_first(roots, lambda node: [] if node in ends else children_of(node))
    with torch.no_grad(), without_autocast():
        found = push_through([node for node in before if node not in ends], starts, losses)
    return {at: found[at].squeeze(0) for at in losses} if found.keys() == losses else None
