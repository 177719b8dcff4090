"""One backward pass of autograd under one context, and what our hooks do in it.

Autograd runs hooks in topological order: when the hook on an output fires, every consumer of that
output has been visited. So a quantity waits where it was sent, at a call's output or at an autograd
node between calls, and each call and node is passed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node, keeps_graph
from backpack_core.autocast import without_autocast
from backpack_core.contract.observer import Grads, Options
from backpack_core.contract.rules import normaliser_of
from backpack_core.engine.active import Context
from backpack_core.engine.between import between
from backpack_core.engine.location import changed_gradient, place, place_between
from backpack_core.engine.observers import answers, overriding, own_observers, returned_by_libraries
from backpack_core.engine.schedule import Schedule
from backpack_core.graph import Survey
from backpack_core.record.call import Call, CallCaches, Edge, Site, edge_of
from backpack_core.record.storage import storage
from backpack_core.record.view import View


class Arguments(NamedTuple):
    """What ``backward()`` was called with.

    Attributes:
        roots: What is differentiated: tensors or gradient edges.
        gradients: The gradient that comes in at each root; ``None`` stands for 1.
        options: ``inputs``, ``create_graph`` and ``accumulate_grad``.
    """

    roots: Sequence[Any] = ()
    gradients: Grads = ()
    options: Options = MappingProxyType({})

    def entries(self) -> list[tuple[Edge, Tensor | None]]:
        """The edge of each root, with its gradient; a root that is a leaf has no edge."""
        pairs = zip(map(_edge_of, self.roots), self.gradients, strict=True)
        return [(edge, gradient) for edge, gradient in pairs if edge is not None]

    def returned(self) -> set[Node]:
        """The nodes of ``inputs``, without leaves."""
        edges = map(_edge_of, self.options.get("inputs") or ())
        return {edge.node for edge in edges if edge is not None}


def _edge_of(value: Any) -> Edge | None:
    """The edge of a tensor or of a gradient edge; ``None`` for a leaf."""
    return edge_of(value) if isinstance(value, Tensor) else Edge(value.node, value.output_nr)


class BackwardPass:
    """The state of one backward pass under one context; dropped when the pass ends or fails.

    Attributes:
        context: What was asked for.
        arguments: What ``backward()`` was called with; empty if the call was not seen.
        roots: Where the pass begins: the roots of ``backward()``, or the edges where the pass was
            first seen.
        gradients: The gradient that comes in at each of them; empty if the call was not seen.
        between: What lies between calls.
        survey: What is known about the graph.
        groups: What travels: the context's groups, and what observers add.
        extensions: Who stores results: the context's extensions, and those that observers add.
        schedule: Where quantities wait.
        traversal: Reads and sends; ``None`` if a library visits all calls in its own way.
        sink: Takes results.
        observers: Who attends the pass.
        is_announced: Whether the call of ``backward()`` was seen, so that all roots are known.
        is_outermost: Whether it began outside of any other pass.
        is_whole: Whether it is outermost, or a part of a pass without calls of its own.
        is_running: Whether autograd has begun.
        is_alone: Whether calls are visited without autograd, so that there are no gradients.
        may_narrow: Whether autograd may do less: it adds to ``.grad``, and no root is a leaf.
        is_differentiable: Whether gradients get a graph of their own.
    """

    is_outermost = is_whole = True  # a library derives a class for passes inside of others

    def __init__(self, context: Context, arguments: Arguments, roots: Sequence[Edge] = ()) -> None:
        """Find out about the graph, before autograd goes anywhere.

        Args:
            context: What was asked for.
            arguments: What ``backward()`` was called with; empty if the call was not seen.
            roots: Where the pass was first seen, if the call was not.

        Raises:
            BackpackError: Something that was asked for does not exist in this graph.
        """
        entries = arguments.entries()
        self.context, self.arguments = context, arguments
        self.is_announced = bool(entries)
        self.roots = [edge for edge, _ in entries] or [*roots]
        self.gradients = [gradient for _, gradient in entries]
        accumulates = bool(arguments.options.get("accumulate_grad"))
        self.may_narrow = accumulates and len(self.roots) == len(arguments.roots)
        self.is_running = self.is_alone = self.is_differentiable = False
        self.between = between()(context)
        if not accumulates:
            self.between.returned = arguments.returned()
        self.survey: Survey = self.between.survey
        self.groups, self.extensions = [*context.groups], [*context.extensions]
        self.schedule: Schedule = self.between.schedule(self.between, self.groups)
        self.sink: Any = self.between.sink(self.survey)
        self.observers = own_observers(context, self.survey)
        self._kept: CallCaches = {}
        self._release_last: list[Call] = []
        if context.propagators:
            self._begin()
        self.before = overriding(self.observers, "before")
        self.after = overriding(self.observers, "after")
        self.traversal: Any = self.between.traversal(self.schedule, self.sink, self._kept)

    def _begin(self) -> None:
        """Have observers attend the pass, and find out about the graph."""
        context = self.context
        if self.is_outermost:  # a part has no share in what is read off the graph as a whole
            self.observers[:0] = [extension.attend(self) for extension in context.whole]
        self.observers += returned_by_libraries(self)
        self.survey_graph()
        for observer in self.observers:
            observer.begin(self)

    def survey_graph(self) -> None:
        """Fill in the survey, and remove the results of earlier passes."""
        self.look_around(self.roots)
        self.sink.clear(self.survey.trained, self.context)
        self.between.refuse_terms(self.roots, not self.is_outermost)
        is_checked = answers(self.observers, "check")
        self.survey.is_measured = self.context.check == "first" and not is_checked

    def look_around(self, edges: list[Edge]) -> None:
        """Walk the graph behind some edges, and refuse what cannot be computed exactly there."""
        survey, context = self.survey, self.context
        try:
            self.between.look_behind(edges)
        except Exception as error:
            place_between(error, survey, None)
            raise
        if survey.sites:
            # Extensions that read a loss as a whole may need no other extended module.
            of_loss = context.whole and all(call.rule.is_loss for call, _ in survey.sites)
            is_some = survey.uses or survey.bare or of_loss
            context.seen.update(["ran", "trained"] if is_some else ["ran"])
        self.between.see_through(edges)

    @property
    def is_needed(self) -> bool:
        """Whether anything happens in the pass: all visits are shown to an observer."""
        return bool(self.survey.sites) or not self.context.extensions

    def is_carried(self) -> bool:
        """Whether an observer has made all visits, without autograd."""
        return self.may_narrow and any(observer.instead(self) for observer in self.observers)

    def options(self) -> Options:
        """The options that autograd is given: those of ``backward()``, as observers change them."""
        given = self.arguments.options
        if not (self.may_narrow and self.is_outermost and self.survey.sites):
            return given
        found = dict(given)
        for observer in self.observers:
            found.update(observer.options(self, given))
        return found

    # Visits --------------------------------------------------------------------------------------

    def passes_by(self, call: Call, index: int) -> bool:
        """Let go of a call if nothing happens at its visit; returns whether it did."""
        return False

    def visit(self, site: Site, grad: Tensor | None, changed_by: Sequence[Any] | None) -> None:
        """Everything that happens at one output of one call.

        Args:
            site: The output.
            grad: The gradient that autograd goes on with there; ``None`` for zero.
            changed_by: The user's hooks on the tensor, if one of them has changed the gradient.
        """
        view = self.view(site, grad)
        for look in self.before:
            look(view)
        self.visit_groups(site, view, changed_by)
        for look in self.after:
            look(view)
        self.let_go(site.call)

    def visit_groups(self, site: Site, view: View, changed_by: Sequence[Any] | None) -> None:
        """Have all groups read at an output, and send their quantities on; see :meth:`visit`."""
        self.is_differentiable = view.is_differentiable
        if not self.context.propagators:
            return
        if changed_by is not None and self.context.is_curvature:
            raise changed_gradient(view, changed_by)
        self._check(view)
        for lane in range(len(self.groups)):
            self.traversal.visit(lane, site, view)

    def _check(self, view: View) -> None:
        """Have a rule refuse what it cannot do, and a loss say what it divides by."""
        rule, needing = view.call.rule, self.context.with_normalisers
        # What is read off the graph as a whole needs no rule.
        is_due = view.is_checked and self.context.is_per_sample and self.survey.asks_rule(view.call)
        is_divided = needing and rule.is_loss and view.is_reached
        try:
            if is_due:
                rule.check(view)
            if is_divided:
                self.sink.normalisers.append(normaliser_of(view))
        except Exception as error:
            place(error, view, needing[0] if is_divided else None)
            raise

    def view(self, site: Site, grad: Tensor | None, kept: CallCaches | None = None) -> View:
        """What rules see at an output; ``kept`` is what was computed from calls alone."""
        is_reached = grad is not None or self.is_alone
        if not is_reached:
            grad = torch.zeros_like(site.call.stored.outputs[site.index])
        view = self.survey.view(site, self._kept if kept is None else kept, grad)
        view.is_reached = is_reached
        return view

    def let_go(self, call: Call) -> None:
        """Free the tensors of a call, unless another visit or pass needs them."""
        is_last = len(call.stored.outputs) == 1  # another output may be visited yet
        if is_last:
            self._kept.pop(call, None)
        if self.context.retain_graph or keeps_graph():
            return
        if is_last:
            call.release()
        else:
            self._release_last.append(call)

    # The end -------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Remove the pass, however it ended."""
        for observer in self.observers:
            observer.leave()
        self.sink.leave()
        for hook in self.schedule.hooks:
            hook.remove()
        passes, task = self.context.passes, self.schedule.task
        if passes.get(task) is self:
            del passes[task]

    def finish(self) -> None:
        """Autograd has finished: store the results that had to wait for that."""
        self.leave()
        for call in self._release_last:
            call.release()
        with torch.set_grad_enabled(self.is_differentiable), without_autocast():
            self.see_end()
            self.store()
        self.hand_over()

    def see_end(self) -> None:
        """Check that nothing was left on the way."""
        self.between.end(self)
        if self.traversal is not None:
            self.traversal.see_end()
        self.sink.see_end()
        for observer in self.observers:
            observer.finish(self)

    def store(self) -> None:
        """Store the results that are known only now."""
        found = [observer.results(self) for observer in self.observers]
        for extension, values in chain(self.sink.finished(), *found):
            for parameter, value in values.items():
                setattr(parameter, extension.savefield, value)

    def hand_over(self) -> None:
        """Tell others that all results are stored."""
        if self.survey.shards:
            storage().hand_over(self.survey, [e.savefield for e in self.context.extensions])
        for observer in self.observers:
            observer.stored(self)
