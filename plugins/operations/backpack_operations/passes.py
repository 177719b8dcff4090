"""Passes over any graph: they go by plans, and may have drivers. Passes inside others.

A pass that a hook began is separate. A pass that the backward of a Python function began (a
re-entrant checkpoint, for example) is a part of the pass around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from backpack_core._torch import graph_task_id
from backpack_core.contract.extension import Extension
from backpack_core.engine.active import Context
from backpack_core.engine.backward import Arguments, BackwardPass
from backpack_core.engine.observers import answers
from backpack_core.errors import UnsupportedError
from backpack_core.record.call import Call, CallCaches, Edge, Site
from backpack_core.record.view import View
from backpack_operations._torch import at_end_of_pass
from backpack_operations.planning import Planning
from backpack_operations.schedule import HookSchedule

if TYPE_CHECKING:
    from backpack_operations.between import Operations  # which imports this file


class GraphPass(BackwardPass):
    """A pass over any graph.

    Attributes:
        is_driven: Whether a driver makes the visits, and :meth:`precede` and :meth:`conclude` are
            called around each; otherwise, :meth:`visit` does the same.
        only_reads: Whether calls without parameters need no visit.
        visiting: The view of the call that is visited now.
    """

    between: Operations
    is_driven = only_reads = False
    _planning: Planning | None = None
    visiting: View | None = None

    def __init__(self, context: Context, arguments: Arguments, roots: Sequence[Edge] = ()) -> None:
        """Find out about the graph; see the base class."""
        super().__init__(context, arguments, roots)
        asks = self.before, self.after, context.whole, context.with_normalisers
        travel = any(g.propagator.travels or g.has_overrides for g in self.groups)
        self.only_reads = self.traversal is None or not (travel or any(asks))

    # Before anything is computed ------------------------------------------------------------------

    def survey_graph(self) -> None:
        """Go by the plan of an earlier pass, or fill in the survey and make one."""
        context, survey = self.context, self.survey
        is_known = self.is_announced and self.is_outermost
        self._planning = Planning(self.between, self.roots if is_known else ())
        survey.is_planned = self._planning.take(self)
        if survey.is_planned:
            context.seen.update(["ran", "trained"])
        else:
            self.look_around(self.roots)
            if self.is_announced or context.whole or not self.is_outermost:  # else more may come
                self.between.refuse_terms(self.roots, not self.is_outermost)
            self._planning.make(self)
        is_unmeasured = context.check == "first" and not answers(self.observers, "check")
        if is_unmeasured:
            self.between.warn_unmeasured()
        survey.is_measured = is_unmeasured and not survey.is_planned  # rules look at values then

    def look_around(self, edges: list[Edge]) -> None:
        """Walk the graph behind some edges, and have autograd call back at nodes without a call."""
        is_first = not self.survey.sites
        super().look_around(edges)
        self.between.attend(self)
        if is_first:
            self.sink.clear(self.survey.trained, self.context)

    @property
    def is_needed(self) -> bool:
        """Whether anything happens in the pass, or a function may begin one inside of it."""
        return super().is_needed or self.between.may_begin_passes

    # Visits ---------------------------------------------------------------------------------------

    def passes_by(self, call: Call, index: int) -> bool:
        """Let go of a call without a visit, if nothing is read there; returns whether it did.

        An activation needs no visit if extensions read autograd's own gradient, and nothing else
        travels.
        """
        site = self.survey.sites.get((call, index)) if self.only_reads else None
        if site is None or self.between.is_visited(site):
            return False
        self.let_go(call)
        return True

    def visit(self, site: Site, grad: Tensor | None, changed_by: Sequence[object] | None) -> None:
        """Visit an output, also one that was not met before; see the base class."""
        if self.context.propagators and site[:2] not in self.survey.sites:
            self.look_around([site.edge])
        if self.is_driven:
            self.visit_groups(site, self.view(site, grad), changed_by)
        else:
            super().visit(site, grad, changed_by)
            self.visiting = None

    def view(self, site: Site, grad: Tensor | None, kept: CallCaches | None = None) -> View:
        """What rules see at an output, which is visited now; see the base class."""
        self.visiting = super().view(site, grad, kept)
        return self.visiting

    def precede(self, site: Site, grad: Tensor | None) -> None:
        """Let observers look at an output before a driver visits it."""
        if self.before:
            view = self.view(site, grad, {})  # what they compute is not part of the visit
            for look in self.before:
                look(view)

    def conclude(self, site: Site, grad: Tensor | None) -> None:
        """Let observers look at an output that a driver has visited, and let go of the call."""
        if self.after:
            view = self.visiting or self.view(site, grad)
            for look in self.after:
                look(view)
        self.visiting = None
        self.let_go(site.call)

    def see_end(self) -> None:
        """Check that nothing was left on the way, and keep the plan."""
        super().see_end()
        if self._planning is not None:
            self._planning.keep(self)


class InnerPass(GraphPass):
    """A pass inside another, or one that was not announced.

    Attributes:
        is_part: Whether it belongs to the pass around it, as that of a re-entrant checkpoint does.
    """

    def __init__(
        self,
        context: Context,
        outer: BackwardPass | None,
        arguments: Arguments | None,
        roots: Sequence[Edge] = (),
        is_part: bool = False,
    ) -> None:
        """Begin it.

        Args:
            context: What was asked for.
            outer: The pass around this one; a hook or a function's backward began this one.
            arguments: What ``backward()`` was called with, if the call was seen.
            roots: Where the pass was first seen, if the call was not.
            is_part: Whether it belongs to the outer pass.
        """
        self._outer: BackwardPass | None = outer
        self.is_part = is_part
        self.is_outermost = outer is None
        self.is_whole = outer is None or (is_part and not outer.survey.sites)
        super().__init__(context, arguments or Arguments(), roots)
        self._outer = None  # which is not kept alive

    def survey_graph(self) -> None:
        """Find out about the graph; results that the outer pass stored do not change."""
        if self._outer is not None:
            self.sink.join(self._outer.sink, self.is_part)
        super().survey_graph()

    def store(self) -> None:
        """Leave it to the outer pass, if this one is a part of it."""
        if not self.is_part:
            super().store()

    def hand_over(self) -> None:
        """Leave it to the outer pass, if this one is a part of it."""
        if not self.is_part:
            super().hand_over()


def pass_inside(context: Context, edge: Edge | None, arguments: Arguments | None) -> BackwardPass:
    """Begin a pass inside another, or one that was not announced; see :class:`Between`."""
    outer = _innermost(context)
    if edge is None:
        return InnerPass(context, outer, arguments)
    ways = [] if outer is None else outer.schedule.inside
    is_part = ways[:1] == [True]
    if is_part:
        _refuse_part(ways, context.whole)
    found = InnerPass(context, outer, None, [edge], is_part)
    # Autograd owns the new pass, which ends with autograd's, also if that fails.
    at_end_of_pass(found.finish)
    assert isinstance(found.schedule, HookSchedule)
    found.schedule.begin()
    found.is_running = True
    context.passes[graph_task_id()] = found
    return found


def _innermost(context: Context) -> BackwardPass | None:
    """The pass that a new one begins inside of now; ``None`` if there is none."""
    others = context.passes.values() if context.passes else ()
    under_way: list[BackwardPass] = [*filter(None, context.announced), *others]
    return under_way[-1] if under_way else None  # they are in the order in which they began


def _refuse_part(ways: Sequence[bool], whole: Sequence[Extension]) -> None:
    """Raise an error if the backward of a function begins a part of a pass that is not known.

    Args:
        ways: For each pass inside the known one, whether a function began it.
        whole: The extensions that read the graph as a whole, which a part does not have.

    Raises:
        UnsupportedError: A hook began the pass of this part, or there are such extensions.
    """
    if whole or not all(ways):
        where = f"{type(whole[0]).__name__} reads as a whole" if whole else "a hook began"
        raise UnsupportedError(
            "Extended modules run in a re-entrant checkpoint, or in a function whose backward() "
            f"calls autograd, and are a part of a pass that {where}, where parts are not known. "
            "Write checkpoint(..., use_reentrant=False), and differentiate the steps of a solver "
            "(odeint, not odeint_adjoint)."
        )
