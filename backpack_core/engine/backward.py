"""One backward pass of autograd, and what our hooks do in it.

Autograd runs hooks in topological order: when the hook on an output fires, every consumer of that
output has been visited. So a quantity waits where it was delivered, at a call's output or at an
autograd node between calls, until autograd gets there, and every call and node is passed once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from backpack_core import _torch
from backpack_core._torch import Node, is_symbolic
from backpack_core.contract.extension import Extension
from backpack_core.engine.active import Context, current, logger
from backpack_core.engine.carriers import Carrier, located
from backpack_core.engine.dye import DyePropagator
from backpack_core.engine.graph_reading import GraphPass
from backpack_core.engine.sweep import Sweep, Values, chunk_size
from backpack_core.engine.traversal import Group, Pending, Traversal
from backpack_core.engine.trust import Trust, trust_in
from backpack_core.errors import UncoveredParameterWarning, UnsupportedError, warn_once
from backpack_core.graph import nodes
from backpack_core.graph.above import nonlinear_above
from backpack_core.graph.order import ranks
from backpack_core.graph.survey import Survey, parameters_of
from backpack_core.graph.views import look_through
from backpack_core.plugins.registry import registry
from backpack_core.record.call import INNER, Call, Edge, Site, edge_of
from backpack_core.record.owner import name_of_parameter, owner_of
from backpack_core.record.view import View
from backpack_core.values import without_autocast


class OutputHook:
    """The tensor hook on the output of a call, before all others."""

    __slots__ = ("call", "hooks", "index", "output_nr")

    def __init__(self, call: Call, index: int, output_nr: int) -> None:
        self.call = call
        self.index = index
        self.output_nr = output_nr
        self.hooks: Any = None

    def __call__(self, grad: Tensor | None) -> None:
        """Called by autograd with the gradient of the output, before other hooks change it."""
        context = current(self.call.thread)
        if context is None:
            if not _torch.keeps_graph():
                self.call.release()
            return
        hooks = self.hooks()
        # What the user's hooks make of the gradient is what autograd goes on with. They are on the
        # tensor, and then on its node: a hook that is put there now runs last.
        others = [] if hooks is None else [hook for key, hook in hooks.items() if key != _torch.KEY]

        def after(grads: tuple[Tensor | None, ...]) -> None:
            handle.remove()
            node = _torch.current_node()  # holding it would be a cycle, if a hook before us fails
            final = grads[self.output_nr]
            site = Site(self.call, self.index, Edge(node, self.output_nr))
            with entered(context, site.edge) as current_pass:
                current_pass.arrive(site, final, None if final is grad else others)
                current_pass.cross(node, grads)  # its hooks are running already

        handle = _torch.current_node().register_prehook(after)


class entered:
    """The backward pass that is under way; begun, if this is the first that is seen of it."""

    def __init__(self, context: Context, edge: Edge) -> None:
        self._context = context
        self._edge = edge
        self._task = _torch.graph_task_id()

    def __enter__(self) -> BackwardPass:
        """Find or begin it."""
        context, task = self._context, self._task
        found: BackwardPass | None = context.passes.get(task)
        if found is None:
            announced: BackwardPass | None = context.announced[-1] if context.announced else None
            inside = _torch.is_inside_function()
            if announced is not None and not announced.is_running and not inside:
                found = announced
            else:
                outer = next(iter(context.passes.values()), announced)
                found = BackwardPass(context, [self._edge], outer=outer, is_part=inside)
                # Autograd owns it: it ends when autograd is through, or has failed.
                _torch.at_end_of_pass(found.finish)
            context.passes[task] = found
        found.is_running = True
        self._precision = without_autocast()  # the forward pass has said what precision to take
        self._precision.__enter__()
        return found

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        """End it, if it failed."""
        self._precision.__exit__(None, None, None)
        if exc_type is not None:
            self._context.passes.pop(self._task, None)


_alive: weakref.WeakSet[BackwardPass] = weakref.WeakSet()


def live_passes() -> int:
    """How many backward passes have not been let go of: zero outside of any."""
    return len(_alive)


class BackwardPass(Traversal):
    """The state of one backward pass under one context; dropped when the pass ends or fails."""

    def __init__(
        self,
        context: Context,
        roots: list[Edge],
        graph: GraphPass | None = None,
        outer: BackwardPass | None = None,
        is_part: bool = False,
        gradients: Sequence[Tensor | None] = (),
    ) -> None:
        """Look around, before autograd goes anywhere.

        Args:
            context: What was asked for.
            roots: What ``backward()`` was called on, or where the pass was first seen.
            graph: For extensions that read the loss as a whole.
            outer: The pass in a hook or a formula of which this one was begun.
            is_part: Whether it belongs to that, as a re-entrant checkpoint does.
            gradients: What comes in at each of the roots, where that is known.

        Raises:
            BackpackError: Something that was asked for does not exist in this graph.
        """
        groups = [Group(p, e, frozenset(n for x in e for n in x.needs)) for p, e in context.groups]
        super().__init__(Survey(), groups)
        _alive.add(self)
        self.context = context
        self.visiting: View | None = None
        self.is_running = False
        self._is_differentiable = False
        if graph is None:  # a pass inside another one has no part in what that is read as a whole
            graph = GraphPass(context.graph_extensions if outer is None else (), None)
        self._graph = graph
        self._partial: Values = {}
        self._deferred: dict[Extension, dict[Tensor, Any]] = {}
        self._release_last: list[Call] = []
        self._ranks: dict[Node, int] = {}
        self._unshared: set[int] = set()
        self._missing: tuple[int, Counter[int]] | None = None
        self._viewed: set[Call] = set()
        self._token = object()  # a reference to this pass would be a cycle
        self._owners: dict[int, object] = {}
        self._is_outermost = outer is None
        self._is_part = is_part and outer is not None
        if outer is not None and is_part:
            self._owners, self._deferred = outer._owners, outer._deferred
        self._is_curvature = any(group.propagator.travels for group in groups)
        self._trust: Trust | None = None
        if self.groups or context.graph_extensions:
            self._look_around(roots)
            self._refuse_outer(roots)
            self._begin_measuring(roots, gradients)

    def _refuse_outer(self, roots: list[Edge]) -> None:
        """Raise where curvature would need that of a function of the loss."""
        is_of_losses = any(e.is_of_losses for e in self.context.graph_extensions)
        is_asked = self._is_curvature or is_of_losses
        node = nonlinear_above(self.survey, roots) if is_asked else None
        if node is not None:
            raise UnsupportedError(
                f"The operation {nodes.described(node)!r} is applied to an extended loss before "
                "backward() is called, and is not known to be linear: curvature would need its "
                "second derivative. Call backward() on the loss itself, or on a weighted sum of "
                "losses."
            )

    def _begin_measuring(self, roots: list[Edge], gradients: Sequence[Tensor | None]) -> None:
        """Have the dye travel, too, if this structure is not known to be right."""
        survey, check = self.survey, self.context.check
        is_asked = check != "never" and self._is_outermost and bool(survey.sites)
        is_asked &= not any(is_symbolic(c.stored.outputs[i]) for c, i in survey.sites)
        if not is_asked or not any(group.propagator.per_sample for group in self.groups):
            return
        trust = trust_in(survey, "curvature" if self._is_curvature else "gradients")
        if not trust.is_due() and check != "always":
            return
        self._trust = trust
        dye = DyePropagator(survey.batch_size, trust.passes, self._is_curvature, survey.is_readable)
        self.groups.append(Group(dye, (), frozenset()))
        for edge, gradient in zip(roots, gradients, strict=False):
            if gradient is not None:
                self.leave_at(len(self.groups) - 1, edge, wide=dye.begin(gradient))

    def _settle(self) -> None:
        """Remember where there is nothing more to learn."""
        if self._trust is not None:
            (dye,) = (g.propagator for g in self.groups if isinstance(g.propagator, DyePropagator))
            before = self._trust.open_sites
            still = {
                number
                for number, place in enumerate(self.survey.sites)
                if place not in dye.settled and not place[0].rule.is_loss
            }
            self._trust.open_sites = still if before is None else still & before

    def arrive(
        self, site: Site, grad: Tensor | None, changed_by: Sequence[Any] | None = None
    ) -> None:
        """Everything that happens at one output of one call.

        Args:
            site: The place.
            grad: The gradient that autograd goes on with; ``None`` for zero.
            changed_by: Hooks of the user's on the tensor, if it was changed by one or another.
        """
        call = site.call
        self.context.seen.add("ran")
        self._is_differentiable = torch.is_grad_enabled()
        if not site.edge.level:
            if self.survey.site_at(Edge(*site.edge[:2], INNER)) is None and self._knows(site):
                return  # it is visited at the tensor that its output is a view of
            self._arrive_through_views(site.edge.node, {site.edge.output_nr: grad})
        axis = call.rule.batch_axis(View(call, site.index), site.index)
        kept = self.kept.setdefault(call, {})
        is_reached = grad is not None
        if grad is None:
            grad = torch.zeros_like(call.stored.outputs[site.index])
        view = self.visiting = View(call, site.index, grad, site.edge.node, axis, kept)
        view.is_reached = is_reached
        if self.groups or self.context.graph_extensions:
            if not self._knows(site):
                self._look_around([site.edge])
            self._refuse_changes(view, changed_by)
            if not call.rule.is_loss:  # a loss matters only where something starts
                with located(view, None):
                    call.rule.check(view)
            for slot in range(len(self.groups)):
                self.visit(slot, site, view)
            self._graph.observe(view)
        if self.context.debug:
            _log(view)
        if self.context.extension_hook is not None:
            self.context.extension_hook(call.module)
        self.visiting = None
        self._let_go(call)

    def _let_go(self, call: Call) -> None:
        """Free what no other visit needs."""
        is_last = len(call.stored.outputs) == 1  # another output may be visited yet
        if is_last:
            self.kept.pop(call, None)
        if self.context.retain_graph or torch.is_grad_enabled():
            return
        if is_last:
            call.release()
        else:
            self._release_last.append(call)

    def leave(self) -> None:
        """The pass is over, however it ended."""
        for task in [t for t, p in self.context.passes.items() if p is self]:
            del self.context.passes[task]

    def finish(self) -> None:
        """Autograd is through: store what had to wait for that."""
        self.leave()
        for call in self._release_last:
            call.release()
        # With backward(inputs=...), a parameter that is none of these may be reached in part: it
        # gets nothing then.
        assert not self._at_sites, "a quantity was left on its way to a call"
        assert not self._at_nodes, "a quantity was left on its way to a node"
        if self._is_part:
            return
        self._settle()
        with torch.set_grad_enabled(self._is_differentiable), without_autocast():
            finished = [(e, e.finish(values)) for e, values in self._deferred.items()]
            for extension, values in (*finished, *self._graph.results(self.survey)):
                for parameter, value in values.items():
                    setattr(parameter, extension.savefield, value)

    # What the traversal asks for -----------------------------------------------------------------

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Set the attribute, with what earlier chunks of columns gave added."""
        key = id(parameter)
        if self._owners.setdefault(key, self._token) is not self._token:
            raise UnsupportedError(
                f"A parameter of shape {list(parameter.shape)} is used inside a re-entrant "
                f"checkpoint and elsewhere, so '{extension.savefield}' would miss a part. Use "
                "torch.utils.checkpoint(use_reentrant=False)."
            )
        self._unshared.add(key)
        before = self._partial.pop((extension, key), None)
        if before is not None:
            value = extension.combine(before, value)
        if extension.is_deferred:
            self._deferred.setdefault(extension, {})[parameter] = value
        else:
            setattr(parameter, extension.savefield, value)

    def is_complete(self, pending: Pending) -> bool:
        """Whether all uses were visited that autograd gets to.

        Those that it leaves out (``backward(inputs=...)``) do not depend on a parameter that it was
        asked for: another output of the same call may be one.
        """
        if super().is_complete(pending):
            return True
        parameter, missing = pending.parameter, self._left_out()
        seen = len(pending.readings) + missing.get(id(parameter), 0)
        is_last = bool(missing) and seen == self.survey.uses[id(parameter)].count
        return is_last and _torch.will_get_gradient(parameter)

    def _left_out(self) -> Counter[int]:
        """How many uses of each parameter autograd does not get to, by ``id``."""
        sites = self.survey.sites
        if self._missing is None or self._missing[0] != len(sites):
            found = [s for s in sites.values() if not _torch.will_execute(s.edge.node)]
            calls = [site.call for site in found if not site.call.is_released]
            uses = Counter(id(use.parameter) for call in calls for use in parameters_of(call))
            self._missing = len(sites), uses
        return self._missing[1]

    def shed(self, slot: int, site: Site, view: View, carrier: Carrier, quantity: Any) -> Any:
        """Carry through at once what does not fit."""
        size = self._chunk_size(slot, view)
        if size is None:
            return quantity
        propagator, call = self.groups[slot].propagator, site.call
        edges = (site.below,) if call.goes_inside and not call.rule.is_loss else call.edges
        is_rooted = any(edge is not None and self._is_rooted(edge) for edge in edges)
        kept, parts = propagator.shed(call.rule, view, quantity, size, is_rooted)
        for part in parts:
            start = partial(
                Sweep.send, slot=slot, site=site, view=view, carrier=carrier, quantity=part
            )
            self._sweep(slot, site, start)
        return kept

    def add_residuals(self, slot: int, site: Site, view: View, inputs: dict[int, Any]) -> None:
        """Carry through at once what does not fit; the rest goes with what there is."""
        propagator = self.groups[slot].propagator
        for position, new in propagator.residual(site.call.rule, view).items():
            edge, size = site.call.edges[position], self._chunk_size(slot, view)
            if edge is None:
                continue
            if size is not None:
                new, parts = propagator.shed(None, view, new, size, self._is_rooted(edge))
                for part in parts:
                    self._sweep(slot, site, partial(Sweep.deliver, slot=slot, edge=edge, own=part))
            old = inputs.get(position)
            inputs[position] = new if old is None else propagator.merge(old, new)

    def _is_rooted(self, edge: Edge) -> bool:
        """Whether what goes to an edge has to be in the form of ``Propagator.rooted``."""
        return self.survey.is_shared or self.survey.site_at(edge) is None

    def _chunk_size(self, slot: int, view: View) -> int | None:
        extensions = self.groups[slot].extensions
        alone = any(e.module_extensions or registry.has_overrides(type(e)) for e in extensions)
        return None if alone else chunk_size(extensions, self.survey, view.device)

    def _sweep(self, slot: int, site: Site, start: Callable[[Sweep], None]) -> None:
        if site.edge.node not in self._ranks:
            self._ranks = ranks(site.edge.node)
        Sweep(self, slot, self._ranks).run(start, self._partial)

    def await_node(self, node: Node) -> None:
        """Autograd calls back when it has visited every consumer of the node's outputs."""
        self._when_reached(node, lambda owner, grads: owner.cross(_torch.current_node(), grads))

    def _when_reached(self, node: Node, function: Any) -> None:
        # Autograd may never get there (backward(inputs=...), an exception): then the hook stays on
        # the node, and must hold neither the node nor this pass.
        this = weakref.ref(self)

        def reached(grads: Any) -> None:
            handle.remove()
            owner = this()
            if owner is not None:
                try:
                    with without_autocast():
                        function(owner, grads)
                except BaseException:
                    owner.context.passes.pop(_torch.graph_task_id(), None)
                    raise

        handle = node.register_prehook(reached)

    # Looking around ------------------------------------------------------------------------------

    def _look_around(self, edges: list[Edge]) -> None:
        """Walk the graph behind some edges, and raise for what cannot be right there."""
        survey, known = self.survey, {node for node, _ in self.survey.viewed}
        is_first = not survey.sites
        bare = set(survey.bare)
        survey.add(edges)
        if survey.faults and any(group.propagator.per_sample for group in self.groups):
            fault = survey.fault()
            if fault is not None:
                raise fault
        if any(
            survey.uses[k].count > 1 or k in survey.bare for k in self._unshared & {*survey.uses}
        ):
            raise UnsupportedError(
                "A second forward pass, or a second branch, shares parameters with the first and "
                "meets it only behind the losses, and the first was through before this one was "
                "seen. Call backward() inside the block on one tensor that both lead to, or on "
                "each loss by itself."
            )
        for node in {node for node, _ in survey.viewed} - known:
            self._when_reached(node, BackwardPass._reach_viewed)
        if survey.sites:
            self._warn_of_bare(bare)
        if is_first and self._is_outermost:
            self._clear_fields()

    def _knows(self, site: Site) -> bool:
        return (site.call, site.index) in self.survey.sites

    def _reach_viewed(self, grads: tuple[Tensor | None, ...]) -> None:
        node = _torch.current_node()
        self._arrive_through_views(node, dict(enumerate(grads)))
        self.cross(node, grads)

    def _arrive_through_views(self, node: Node, grads: dict[int, Tensor | None]) -> None:
        """Visit calls that returned views of a node's outputs, overwritten in place afterwards."""
        for site in list(self.survey.sites.values()):
            if site.layout is None or site.edge.node is not node or site.call in self._viewed:
                continue
            grad = grads.get(site.edge.output_nr)
            self._viewed.add(site.call)
            seen = None if grad is None else look_through(grad.unsqueeze(0), site.layout).squeeze(0)
            self.arrive(site, seen)

    def _warn_of_bare(self, known: set[int]) -> None:
        for key in self.survey.bare.keys() - known - self.survey.uses.keys():
            parameter, node = self.survey.bare[key]
            operation = nodes.name_of(node)
            self._refuse_gaps(parameter, operation)
            modules = (call.module for call, _ in self.survey.sites)
            name = name_of_parameter(modules, parameter)
            which = "A parameter" if name is None else f"The parameter {name}"
            warn_once(
                (key, name, tuple(parameter.shape), operation),
                f"{which} of shape {list(parameter.shape)} is used by the operation {operation!r} "
                "outside of any module that owns it: it gets no quantity. Make it a parameter of "
                "the module whose forward() uses it.",
                UncoveredParameterWarning,
            )

    def _refuse_gaps(self, parameter: Tensor, operation: str) -> None:
        """Raise where a quantity means nothing without a parameter."""
        for extension in self.context.extensions:
            if extension.needs_every_parameter:
                raise UnsupportedError(
                    f"A parameter of shape {list(parameter.shape)} is used by the operation "
                    f"{operation!r} outside of any extended module that owns it, and "
                    f"{registry.describe(extension)} means nothing without it. Extend the module "
                    "that it belongs to, make it a parameter of the module whose forward() uses "
                    "it, or freeze it."
                )

    def _clear_fields(self) -> None:
        """Remove the fields of earlier passes from the models that take part in this one."""
        extensions = self.context.extensions
        models = {id(m): m for m in (owner_of(c.module) for c, _ in self.survey.sites)}
        for model in models.values():
            for parameter in model.parameters():
                for extension in extensions:
                    parameter.__dict__.pop(extension.savefield, None)

    def _refuse_changes(self, view: View, changed_by: Sequence[Any] | None) -> None:
        if changed_by is None or not (self._is_curvature or self.context.graph_extensions):
            return
        names = [getattr(hook, "__qualname__", repr(hook)) for hook in changed_by]
        where = f"that tensor ({', '.join(names)})" if names else "its autograd node"
        raise UnsupportedError(
            f"The gradient of the output of {view.path} is changed by a hook on {where}, so "
            "curvature of the loss is not that of what backward() differentiates. Remove the hook, "
            "or leave second-order extensions out."
        )


def _log(view: View) -> None:
    logger.info(
        "%s: output %s, rule %s of %s",
        view.path,
        list(view.output_shape),
        type(view.call.rule).__name__,
        view.call.provenance,
    )


def begin(
    context: Context, roots: Sequence[Any], gradients: tuple[Tensor | None, ...]
) -> BackwardPass | None:
    """Begin a pass whose roots are known, before autograd does.

    Args:
        context: What was asked for.
        roots: What ``backward()`` is called on: tensors, or edges of the graph.
        gradients: What comes in at each of them.

    Returns:
        The pass; ``None`` where nothing was asked for, or no extended module is behind the roots.
    """
    if not context.extensions:
        return None
    edges, incoming = [], []
    for root, gradient in zip_longest(roots, gradients):
        edge = edge_of(root) if isinstance(root, Tensor) else Edge(root.node, root.output_nr)
        if edge is not None:
            edges.append(edge)
            is_one = gradient is None and isinstance(root, Tensor)
            incoming.append(torch.ones_like(root) if is_one else gradient)
    outer = next(iter(context.passes.values()), None)
    graph = GraphPass(context.graph_extensions, tuple(roots), gradients)
    current_pass = BackwardPass(context, edges, graph, outer, gradients=incoming)
    return current_pass if current_pass.survey.sites else None
