"""The interface to what lies between the calls of a graph, and to what earlier passes found there.

A :class:`Between` walks the graph before the pass, and carries quantities through operations during
it. Core has one for chains of modules with rules, where calls lead to calls (``chain.py``). A
library that knows operations provides another by the hook ``backpack_operation``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core._torch import Node, is_distributed
from backpack_core.engine.active import Context, Group
from backpack_core.graph import Survey
from backpack_core.record.call import Call, CallCaches, Edge, Site
from backpack_core.record.execution import Execution
from backpack_core.record.models import Place, Run
from backpack_core.record.state import Traits

if TYPE_CHECKING:
    from backpack_core.engine.backward import Arguments, BackwardPass
    from backpack_core.engine.schedule import Schedule
    from backpack_core.engine.sink import Sink
    from backpack_core.engine.traversal import Traversal


class Planning:
    """What is known before the graph of one pass is surveyed. Core alone knows nothing.

    A library derives from it.
    """

    def take(self, run: Any) -> bool:
        """Fill in the survey, and clear the results of earlier passes; returns whether it did.

        Args:
            run: The pass, before anything is surveyed.
        """
        return False

    def make(self, run: Any) -> None:
        """Note what the survey of a pass has found, before observers look at the pass."""

    def keep(self, run: Any) -> None:
        """Keep what was noted, since the pass went well."""


S = TypeVar("S", bound=Survey)


class Between(ABC, Generic[S]):
    """What lies between the calls of one pass. It must not hold the pass or a schedule.

    Attributes:
        context: What was asked for.
        survey: What is known about the graph.
        schedule: Makes the schedule, where quantities wait in autograd's order, from this object
            and the groups.
        sink: Makes the sink, where results go, from a survey.
        returned: The nodes of tensors whose gradients ``torch.autograd.grad`` returns. It gets
            there, but runs only those behind which it needs more.
    """

    survey: S
    schedule: Callable[[Any, Sequence[Group]], Schedule]
    sink: Callable[[Any], Sink]
    returned: Collection[Node] = ()

    def __init__(self, context: Context) -> None:
        """Begin a pass; nothing is known about its graph."""
        self.context = context

    @staticmethod
    @abstractmethod
    def said(samples: Any, beside: Any) -> tuple[Any, frozenset[tuple[Node, int]]]:
        """Check these arguments of ``backpack(...)``, and return what the context keeps of them.

        Raises:
            UsageError: They do not say which rows belong to which sample, or name no terms.
        """

    @staticmethod
    @abstractmethod
    def axes_of(module: Module, given: int | Mapping[str, int]) -> dict[str, int]:
        """The argument of ``extend(batch_axis=...)`` by module path; called unless it is 0.

        Raises:
            UsageError: It does not name an axis, or names something that the model does not have.
        """

    @staticmethod
    def run_of(model: Module | None, placed: Sequence[tuple[Place, Tensor]], axis: int) -> Run:
        """What is noted about a forward pass of an extended model; see :class:`Run`."""
        return Run(placed, axis, is_distributed(model))

    @staticmethod
    def is_parameter(tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or stands in for one."""
        return isinstance(tensor, Parameter)

    @staticmethod
    def note_view(call: Call, index: int, output: Tensor, base: Tensor) -> None:
        """Note that a call has returned a view of a tensor that its module made."""

    @staticmethod
    def record(module: Module, traits: Traits, args: Any, result: Any, execution: Execution) -> Any:
        """Record a call that does not make one new tensor from others. Default: none is recorded.

        Args:
            module: The module.
            traits: What all of its calls have in common.
            args: Its positional arguments.
            result: What it returned.
            execution: What was known before it ran.

        Returns:
            What replaces the result; ``None`` for nothing.
        """
        return None

    @staticmethod
    @abstractmethod
    def pass_inside(
        context: Context, edge: Edge | None, arguments: Arguments | None
    ) -> BackwardPass:
        """Begin a pass inside of another, or one whose call of ``backward()`` was not seen.

        Args:
            context: What was asked for.
            edge: Where the pass was first seen, if its call was not.
            arguments: What ``backward()`` was called with, if the call was seen.
        """

    # Before anything is computed ------------------------------------------------------------------

    @abstractmethod
    def look_behind(self, edges: list[Edge]) -> None:
        """Walk the graph behind some edges, and fill the survey.

        Raises:
            BackpackError: No quantity can go through something in the graph.
        """

    @abstractmethod
    def see_through(self, edges: list[Edge]) -> None:
        """Find out where samples lie behind edges that were walked.

        Raises:
            BackpackError: Something that was asked for does not exist in this graph.
        """

    @abstractmethod
    def refuse_terms(self, roots: Sequence[Edge], is_inside: bool) -> None:
        """Raise if ``backward()`` was called on more than extended losses.

        Args:
            roots: What it was called on.
            is_inside: Whether it was called in a hook of another pass.

        Raises:
            BackpackError: A quantity would miss a term, or what a loss divides by is not known.
        """

    def nonlinear(self) -> list[Node]:
        """The operations that depend on parameters and may be nonlinear. Default: none."""
        return []

    # What is known already ------------------------------------------------------------------------

    def planning(self, roots: Sequence[Edge]) -> Planning:
        """What earlier passes have found out about the graph. Default: nothing.

        Args:
            roots: What ``backward()`` was called on; empty if that is not known.
        """
        return Planning()

    @staticmethod
    def latest_plan(model: Module) -> Any:
        """What was found out last about a model, to be shown; ``None`` for nothing."""
        return None

    @staticmethod
    def forget(model: Module) -> None:
        """Forget what was found out about a model. Default: nothing is known."""

    # Visits ---------------------------------------------------------------------------------------

    @abstractmethod
    def traversal(self, schedule: Schedule, sink: Sink, kept: CallCaches) -> Traversal | None:
        """What happens at visits of this graph; ``None`` if :meth:`reach` does all of it.

        Args:
            schedule: Where quantities wait.
            sink: Where results go.
            kept: What was computed from each call alone.
        """

    def warn_unmeasured(self) -> None:
        """Warn if something ought to be measured, and no library does so. Default: nothing."""

    @property
    def needs_autograd(self) -> bool:
        """Whether only autograd knows which gradients are undefined. Default: no."""
        return False

    @property
    def may_begin_passes(self) -> bool:
        """Whether a function in the graph may begin a pass of its own. Default: no."""
        return False

    def attend(self, run: BackwardPass) -> None:
        """Have autograd call back at nodes without a call. Default: nowhere."""
        return

    def is_visited(self, site: Site) -> bool:
        """Whether a call needs a visit if extensions only read. Default: if it is read there."""
        return bool(self.survey.trained[site.call])

    def reach(
        self,
        run: BackwardPass,
        site: Site,
        grads: Sequence[Tensor | None],
        changed_by: Sequence[Any] | None,
    ) -> None:
        """Autograd has reached an output of a call. Default: visit it.

        Args:
            run: The pass.
            site: The output.
            grads: The gradients that autograd goes on with at its node; ``None`` for zero.
            changed_by: See :meth:`BackwardPass.visit`.
        """
        run.visit(site, grads[site.edge.output_nr], changed_by)

    def end(self, run: BackwardPass) -> None:
        """Autograd has finished: visit what it did not get to. Default: nothing."""
        return

    @abstractmethod
    def leave(self, schedule: Schedule, lane: int, edge: Edge, wide: Any, own: Any) -> None:
        """Take what was sent to an edge without a call; see :meth:`Schedule.leave`."""
