"""One backward pass of autograd under one context, and what our hooks do in it.

Autograd runs hooks in topological order: when the hook on an output fires, every consumer of that
output has been visited. So a quantity waits where it was sent, at a call's output or at an autograd
node between calls, and each call and node is passed once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import keeps_graph
from backpack_core.autocast import without_autocast
from backpack_core.contract.observer import Driver, Grads, Options
from backpack_core.engine import losses
from backpack_core.engine.active import Context
from backpack_core.engine.attending import (
    answers,
    observers_of_libraries,
    overriding,
    own_observers,
    warn_unmeasured,
)
from backpack_core.engine.chain import between
from backpack_core.engine.fields import clear, hand_over
from backpack_core.engine.location import place, place_between
from backpack_core.engine.planning import Planning
from backpack_core.engine.schedule import HookSchedule
from backpack_core.engine.sink import FieldSink
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Call, CallCaches, Edge, Site
from backpack_core.record.view import View
from backpack_core.replaced import replaced


class BackwardPass:
    """The state of one backward pass under one context; dropped when the pass ends or fails.

    Attributes:
        context: What was asked for.
        roots: What ``backward()`` was called on, or where the pass was first seen.
        gradients: What comes in at each of the roots, where that is known.
        given: What ``backward()`` was called on, and what comes in there, where that is known.
        options: What else it was told.
        driver: What visits calls in the place of the engine, if anything does.
        driven: The outputs that it visits, if it does all visits.
        survey: What is known about the graph.
        between: What lies between its calls.
        groups: What travels: the context's groups, and what observers add.
        schedule: Where quantities wait.
        traversal: Reads and sends.
        sink: Takes results.
        observers: Who attends it.
        of_losses: The extensions whose quantity is the curvature of extended losses.
        is_per_sample: Whether samples have to stay apart, since quantities belong to single ones.
        is_curvature: Whether quantities belong to what autograd brings, and nothing besides.
        visiting: What rules see of the call that is visited now.
        is_announced: Whether ``backward()`` was seen, so that all roots are known.
        is_outermost: Whether it was begun in no hook of another pass.
        is_whole: Whether it is no part of another one; of one in which there is nothing else, it
            counts as the whole.
        is_running: Whether autograd has begun.
        is_alone: Whether it does not go, so that there are no gradients.
        is_differentiable: Whether it makes a graph of its own.
        only_reads: Whether nothing is sent on, or shown to anybody.
    """

    def __init__(
        self,
        context: Context,
        roots: list[Edge],
        outer: BackwardPass | None = None,
        is_part: bool = False,
        gradients: Grads = (),
        given: Sequence[tuple[Any, Tensor | None]] = (),
        options: Options = MappingProxyType({}),
    ) -> None:
        """Look around, before autograd goes anywhere.

        Args:
            context: What was asked for.
            roots: What ``backward()`` was called on, or where the pass was first seen.
            outer: The pass in a hook or a formula of which this one was begun.
            is_part: Whether it belongs to that, as a re-entrant checkpoint does.
            gradients: What comes in at each of the roots, where that is known.
            given: What ``backward()`` was called on, and what comes in there, where that is known.
            options: What else it was told.

        Raises:
            BackpackError: Something that was asked for does not exist in this graph.
        """
        self.context = context
        self.roots, self.gradients, self.given = [*roots], gradients, given
        self.options = options
        self.driver: Driver | None = None
        self.driven: Container[tuple[Call, int]] | None = None
        self.visiting: View | None = None
        self.is_running = self.is_alone = False
        self.is_differentiable = self.only_reads = False
        self.is_outermost = outer is None
        self._clears: bool = outer is None or (is_part and outer._clears)
        self.is_whole = outer is None or (is_part and not outer.survey.sites)
        self.is_announced = bool(gradients)
        groups, whole = context.groups, context.whole
        asked = [*(group.propagator for group in groups), *(e.propagator for e in whole)]
        self.between = between().of(context, asked)
        self.survey: Survey = self.between.survey
        self.of_losses = losses.curvature_of_losses(groups, whole)
        self._divided = [e for e in context.extensions if e.needs_normalisers]
        self.is_per_sample = any(propagator.per_sample for propagator in asked)
        self.is_curvature = bool(whole) or any(group.propagator.travels for group in groups)
        self._kept: CallCaches = {}
        self._release_last: list[Call] = []
        self.groups = list(context.groups)
        self._is_part = is_part
        self.sink: FieldSink = FieldSink(self.survey, outer.sink if outer else None, is_part)
        self.schedule = HookSchedule(self.between, self.groups, context.passes)
        self._planning: Planning | None = None
        self.observers = own_observers(context, self.survey)
        if not (groups or whole):
            self._begin_visits()
            return
        if outer is None:  # else it has no part in what that is read as a whole
            self.observers[:0] = [extension.attend(self) for extension in whole]
        self.observers += observers_of_libraries(self)
        is_known = self.is_announced and self.is_outermost
        self._planning = planning = Planning(context, self.between, roots if is_known else ())
        if not self._take_plan(planning):
            self._look_around(roots)
            if gradients or whole or not self.is_outermost:  # else more may come
                terms = self.of_losses, self._divided
                self.between.refuse_terms(roots, *terms, outer is not None)
        self._begin_observing()
        planning.make()

    def _take_plan(self, planning: Planning) -> bool:
        """Go by the plan of an earlier pass, if there is a settled one."""
        context, survey = self.context, self.survey
        known, structure = planning.take(self.observers), planning.structure
        if known is None or structure is None:
            return False
        drivers = [observer.drive(self, known, structure) for observer in self.observers]
        self.driver = next((driver for driver in drivers if driver is not None), None)
        self.driven = None if self.driver is None else self.driver.outputs
        if self.driven is not None:
            survey.is_planned, survey.sites = True, structure.sites
            survey.batch_size = known.batch_size
        else:
            known.fill(survey, structure)
            self.between.fill(known.plan.numbers, structure)
            self.between.attend(self)
        context.seen.update(["ran", "trained"])
        calls = [call for call, _ in structure.sites if not call.rule.is_loss]
        clear(survey, calls, context, self.sink.new, known, structure.parameters)
        return True

    def _look_around(self, edges: list[Edge]) -> None:
        """Walk the graph behind some edges, and raise for what cannot be right there."""
        survey, is_first = self.survey, not self.survey.sites
        try:
            self.between.look_behind(edges)
        except Exception as error:
            place_between(error, survey, None)
            raise
        if survey.sites:
            # What reads a loss as a whole may need nothing else.
            of_loss = self.context.whole and all(c.rule.is_loss for c, _ in survey.sites)
            is_some = survey.uses or survey.bare or of_loss
            self.context.seen.update(["ran", "trained"] if is_some else ["ran"])
        self.between.see_through(edges)
        self.between.attend(self)
        if is_first and self._clears:
            clear(survey, survey.trained, self.context, self.sink.new)

    def _begin_observing(self) -> None:
        """Have observers add to what travels, now that the graph is known."""
        survey = self.survey
        survey.is_measured = False
        if self.context.check == "first" and not answers(self.observers, "check"):
            warn_unmeasured(self.between)
            survey.is_measured = not survey.is_planned  # values may be looked at, all the same
        for observer in self.observers:
            observer.begin(self)
        self._begin_visits()

    def _begin_visits(self) -> None:
        self.only_reads = True
        if self.driven is not None:
            return
        self.traversal = self.between.traversal(self.schedule, self.sink, self._kept)
        self._before = overriding(self.observers, "before")
        self._after = overriding(self.observers, "after")
        asks = self._before, self._after, self.context.whole, self._divided
        travel = [g.propagator.travels or g.has_overrides for g in self.groups]
        self.only_reads = not (any(asks) or any(travel))

    def is_carried(self, given: Options, gradients: Grads) -> bool:
        """Whether an observer does all visits, and autograd need not go.

        Args:
            given: The arguments of ``backward()``.
            gradients: What comes in at each root.
        """
        return any(observer.instead(self, given, gradients) for observer in self.observers)

    def narrow(self, given: Options) -> Options:
        """What to tell autograd in the place of the arguments of ``backward()``."""
        if not self.is_outermost or not self.survey.sites:
            return given
        found = dict(given)
        for observer in self.observers:
            found.update(observer.options(self, given))
        return found

    # Visits --------------------------------------------------------------------------------------

    def passes_by(self, call: Call, index: int) -> bool:
        """Let go of a call without a visit, if nothing is read there, in a pass that only reads.

        So it is with an activation where nothing travels but autograd's own gradient.
        """
        survey, driven = self.survey, self.driven
        site = survey.sites.get((call, index))
        if site is None or (driven is not None and (call, index) in driven):
            return False
        if driven is None and (survey.trained[call] or self.between.is_watched(site)):
            return False
        self.let_go(call)
        return True

    def reach(self, site: Site, grads: Grads, changed_by: Sequence[Any] | None) -> None:
        """Autograd has reached an output of a call; see :meth:`Between.reach`."""
        if self.driver is None or (site.call, site.index) not in self.survey.sites:
            self.between.reach(self, site, grads, changed_by)
        else:
            self.driver.reach(self, site, grads, changed_by)

    def visit(self, site: Site, grad: Tensor | None, changed_by: Sequence[Any] | None) -> None:
        """Everything that happens at one output of one call.

        Args:
            site: The place.
            grad: The gradient that autograd goes on with there; ``None`` for zero.
            changed_by: Hooks of the user's on the tensor, if it was changed by one or another.
        """
        call, context = site.call, self.context
        is_asked = bool(self.groups or context.whole)
        if is_asked and (call, site.index) not in self.survey.sites:
            self._look_around([site.edge])
        view = self.view(site, grad)
        self.is_differentiable = view.is_differentiable
        for look in self._before:
            look(view)
        if is_asked:
            if changed_by is not None and self.is_curvature:
                raise losses.changed_gradient(view, changed_by)
            # What is read off the graph as a whole needs no rule.
            if view.is_checked and self.is_per_sample and self.survey.asks_rule(call):
                try:
                    call.rule.check(view)
                except Exception as error:
                    place(error, view, None)
                    raise
            if self._divided and call.rule.is_loss and view.is_reached:
                self.sink.normalisers.append(losses.normaliser_for(self._divided[0], view))
            for lane in range(len(self.groups)):
                self.traversal.visit(lane, site, view)
        for look in self._after:
            look(view)
        self.visiting = None
        self.let_go(call)

    def view(self, site: Site, grad: Tensor | None) -> View:
        """What rules see at an output."""
        is_reached = grad is not None or self.is_alone
        if not is_reached:
            grad = torch.zeros_like(site.call.stored.outputs[site.index])
        view = self.visiting = self.survey.view(site, self._kept, grad)
        view.is_reached = is_reached
        return view

    def let_go(self, call: Call) -> None:
        """Free what no other visit needs."""
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
        """The pass is over, however it ended."""
        for observer in self.observers:
            observer.leave()
        replaced.drop()
        for hook in self.schedule.hooks:
            hook.remove()
        for task in [t for t, p in self.context.passes.items() if p is self]:
            del self.context.passes[task]

    def finish(self) -> None:
        """Autograd is through: store what had to wait for that."""
        self.leave()
        for call in self._release_last:
            call.release()
        with torch.set_grad_enabled(self.is_differentiable), without_autocast():
            self._end()
        if self._is_part:
            return
        hand_over(self.survey, self.context.extensions)
        for observer in self.observers:
            observer.stored(self)

    def _end(self) -> None:
        """Read what autograd did not get to, see that all went well, and store what waited."""
        self.between.end(self)
        if self.driver is not None:
            self.driver.end(self)
        if self.driven is None:
            self.traversal.see_end()
        self.sink.see_end()
        for observer in self.observers:
            observer.finish(self)
        if self._planning is not None:
            self._planning.keep(self.observers)
        if self._is_part:
            return
        found = [observer.results(self) for observer in self.observers]
        for extension, values in chain(self.sink.finished(), *found):
            for parameter, value in values.items():
                setattr(parameter, extension.savefield, value)
