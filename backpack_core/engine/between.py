"""What lies between the calls of a graph: core knows chains, in which nothing does.

In a chain, every input of a call is data or the output of a call. Functions may follow the last
calls, as long as no quantity goes through them. Everything else needs the library *operations*,
which derives from :class:`Between`; errors name it if it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core._torch import Node, has_memory, is_distributed
from backpack_core.engine.active import Context
from backpack_core.engine.location import nothing_arrived
from backpack_core.engine.schedule import Schedule
from backpack_core.engine.sink import Sink
from backpack_core.engine.traversal import Traversal
from backpack_core.errors import BackpackError, MissingPluginError, SampleMixingError
from backpack_core.graph import Survey, described, is_leaf
from backpack_core.plugins.loading import missing
from backpack_core.plugins.registration import answer
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Call, CallCaches, Edge, Site, has_call, site_at
from backpack_core.record.execution import Execution
from backpack_core.record.models import NO_RUN, Run
from backpack_core.record.nested import iter_tensors
from backpack_core.record.state import Traits
from backpack_core.record.view import View

if TYPE_CHECKING:
    from backpack_core.engine.backward import BackwardPass


def between() -> type[Between]:
    """The class of the library; core's own if no library is installed."""
    return answer("backpack_operation") or Between


def needs_operations(what: str) -> MissingPluginError:
    """The error for a graph that is not such a chain."""
    return missing(
        f"{what}. Core alone knows chains of modules with layer rules, with samples on axis 0. "
        "Install backpack-operations, which knows operations between modules and where samples "
        "lie: pip install backpack-operations.",
        "operations",
    )


def mixing(what: str, further: str = "") -> BackpackError:
    """The error for a call, or an operation between calls, that mixes samples."""
    return SampleMixingError(
        f"{what} makes every sample of the batch influence every other (a batch normalisation in "
        "train mode does, and a softmax over axis 0), so per-sample quantities do not exist. Call "
        f"model.eval(), or use a layer that treats samples one by one, such as GroupNorm.{further}"
    )


def _refused(what: str) -> Any:
    """A function that refuses whatever it is called with."""

    def refuse(*_: object) -> Any:
        raise needs_operations(what)

    return staticmethod(refuse)


class Between:
    """What lies between the calls of one pass: it walks the graph, and knows what is sent where.

    It must not hold the pass or a schedule. A library derives from it.

    Attributes:
        context: What was asked for.
        survey: What is known about the graph.
        schedule: Makes the schedule, where quantities wait in autograd's order, from this object
            and the groups.
        sink: Makes the sink, where results go, from a survey.
        passes: The class of passes; ``None`` for core's.
        returned: The nodes of tensors whose gradients ``torch.autograd.grad`` returns. It gets
            there, but runs only those behind which it needs more.
        said: Checks ``backpack(samples=..., beside=...)``, and returns what the context keeps.
        axes_of: The argument of ``extend(batch_axis=...)`` by module path; called unless it is 0.
        pass_inside: Begins a pass inside of another, or one whose call of ``backward()`` was not
            seen, from the context, the edge where it was first seen, and the arguments.
    """

    survey: Any
    schedule: Callable[..., Schedule] = Schedule
    sink: Callable[..., Sink] = Sink
    passes: type[BackwardPass] | None = None
    returned: Collection[Node] = ()
    said = _refused("backpack(samples=...) and backpack(beside=...) say what rows and terms are")
    axes_of = _refused("extend(batch_axis=...) says that samples are on an axis other than 0")
    pass_inside = _refused(
        "A backward pass began inside of another (in a hook, or in a re-entrant checkpoint), or "
        "not by backward()"
    )

    def __init__(self, context: Context) -> None:
        """Begin a pass; nothing is known about its graph."""
        self.context, self.survey = context, Survey()
        self._first: Call | None = None  # the first one that received data
        self._mixing: list[BackpackError] = []

    # The forward pass -----------------------------------------------------------------------------

    @staticmethod
    def run_of(model: Module | None, received: Sequence[Any], axis: int) -> Run:
        """What is noted about a forward pass of an extended model; see :class:`Run`."""
        return Run([*iter_tensors(received)], axis, is_distributed(model))

    @staticmethod
    def traits_of(module: Module) -> Traits:
        """The rule and the settings of a module. A library may remember them until it changes."""
        return Traits(module, registry.resolve(module))

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

    # Before anything is computed ------------------------------------------------------------------

    def look_behind(self, edges: list[Edge]) -> None:
        """Walk through functions that follow the last calls, and from call to call."""
        seen = set[Node]()
        todo = [(edge, "backward()", True) for edge in edges]
        while todo:
            edge, user, is_after = todo.pop()
            node: Any = edge.node
            if has_call(node) or not is_after:
                site = self._site_at(edge, user)
                if (site.call, site.index) not in self.survey.sites and not site.call.is_released:
                    self._enter(site)
                    todo += [(e, site.call.path, False) for e in site.call.edges if e is not None]
            elif is_leaf(node) and self.is_parameter(node.variable):
                raise needs_operations(f"{user} uses a parameter of shape {[*node.variable.shape]}")
            elif node not in seen:
                seen.add(node)
                further = [Edge(*way) for way in node.next_functions if way[0] is not None]
                todo += [(e, f"The operation {described(node)!r}", True) for e in further]

    def _site_at(self, edge: Edge, user: str) -> Site:
        site = site_at(edge) if has_call(edge.node) else None
        if site is None:
            raise needs_operations(
                f"{user} uses what the operation {described(edge.node)!r} made"
                f"{self._after(edge.node)}"
            )
        return site

    def _after(self, node: Node) -> str:
        paths = self.survey.sources(node)
        return f" of the output of {' and '.join(paths)}" if paths else ""

    def _enter(self, site: Site) -> None:
        """Note a call; refuse it if it is not one of a chain."""
        call, survey = site.call, self.survey
        survey.structure = None
        survey.sites[call, site.index] = site
        survey.note_uses(call)
        if survey.is_shared:
            raise needs_operations(f"{call.path} has a parameter that is used more than once")
        if why := self._why_other(call, site.index):
            raise needs_operations(f"{call.path} {why}")
        stored = call.stored
        survey.batch_size = survey.batch_size or len(stored.inputs[0])
        if call.rule.mixes_samples(View(call, site.index)):
            self._mixing.append(mixing(call.path))

    def _why_other(self, call: Call, index: int) -> str:
        """Why a call is not one of a chain; empty if it is."""
        rule, stored, survey = call.rule, call.stored, self.survey
        if rule.transparent:
            return "has no layer rule, so it consists of operations"
        if call in survey.freed:
            return f"has a parameter {survey.freed[call][0].name!r} that its layer rule leaves out"
        if any(map(self.is_parameter, stored.inputs)) or any(
            tensor.grad_fn is not None for tensor, _ in stored.owned.values()
        ):
            return "has parameters that are computed, or given (as by functional_call)"
        if call.is_rewired or call.module._modules:
            return "changed a view in place" if call.is_rewired else "has modules inside"
        if not call.edges or not all(map(has_memory, (*stored.inputs, *stored.outputs))):
            return "received no tensor, or a nested or sparse one"
        if rule.batch_axis(View(call, index), index):
            return "has its samples on an axis other than the first"
        rows = stored.inputs[0].shape[:1].numel() if stored.inputs[0].dim() else 0
        returned = stored.outputs[index].shape[:1]
        if not rule.is_loss and (not returned or returned[0] != rows):
            return f"received {rows} rows and returned {[*returned]}"
        if not rows or rows != (survey.batch_size or rows):
            return f"received {rows} rows, and other modules {survey.batch_size}"
        return "" if rule.is_loss else self._why_other_run(call, rows)

    def _why_other_run(self, call: Call, rows: int) -> str:
        """Why the samples of a call may not be those of its model; empty if they are."""
        if any(call.edges):
            return ""
        run, first = call.run, self._first or call
        self._first = first
        if run is not first.run or (run is NO_RUN and call is not first):
            return f"received data, and so did {first.path}, in another call of a model or in none"
        if run.sizes and run.sizes != (rows,):
            return f"received {rows} rows, and its model {' and '.join(map(str, run.sizes))}"
        if run.sizes and call.receives_input < 2:
            return "received something other than its model did"
        return ""

    def see_through(self, edges: list[Edge]) -> None:
        """Raise if samples influence each other."""
        if self._mixing and self.context.is_per_sample:
            raise self._mixing[0]

    def refuse_terms(self, roots: Sequence[Edge], is_inside: bool) -> None:
        """Raise unless ``backward()`` was called on an extended loss itself."""
        for extension in (*self.context.of_losses, *self.context.with_normalisers):
            name = type(extension).__name__
            for edge in roots:
                site = self._site_at(edge, name)
                if not site.call.rule.is_loss:
                    raise nothing_arrived(View(site.call, site.index), name)

    def nonlinear(self) -> list[Node]:
        """The operations that depend on parameters and may be nonlinear. Default: none."""
        return []

    # What earlier passes found --------------------------------------------------------------------

    @staticmethod
    def latest_plan(model: Module) -> Any:
        """What was found out last about a model, to be shown; ``None`` for nothing."""
        return None

    @staticmethod
    def forget(model: Module) -> None:
        """Forget what was found out about a model. Default: nothing is known."""

    # Visits ---------------------------------------------------------------------------------------

    def traversal(self, schedule: Schedule, sink: Sink, kept: CallCaches) -> Traversal | None:
        """What happens at visits of this graph; ``None`` if :meth:`reach` does all of it.

        Core's sends all columns at once.

        Args:
            schedule: Where quantities wait.
            sink: Where results go.
            kept: What was computed from each call alone.
        """
        if any(group.has_overrides for group in schedule.groups):
            raise needs_operations("An extension has carriers, which replace layer rules")
        if any(group.propagator.subsampling is not None for group in schedule.groups):
            raise needs_operations("subsampling=... chooses samples")
        return Traversal(schedule, sink)

    def reach(
        self,
        run: BackwardPass,
        site: Site,
        grads: Sequence[Tensor | None],
        changed_by: Sequence[Any] | None,
    ) -> None:
        """Autograd has reached an output of a call. Default: visit it, if it is in the chain.

        Args:
            run: The pass.
            site: The output.
            grads: The gradients that autograd goes on with at its node; ``None`` for zero.
            changed_by: See :meth:`BackwardPass.visit`.
        """
        is_met = site[:2] in self.survey.sites or site.call.is_released
        if self.context.propagators and not is_met:
            raise needs_operations(f"{site.call.path} ran inside of a module with a layer rule")
        run.visit(site, grads[site.edge.output_nr], changed_by)

    def end(self, run: BackwardPass) -> None:
        """Autograd has finished: visit what it did not get to. Default: nothing."""

    def leave(self, schedule: Schedule, lane: int, edge: Edge, wide: Any, own: Any) -> None:
        """Refuse: at every edge of a chain there is a call.

        Raises:
            MissingPluginError: Always.
        """
        raise needs_operations(
            f"A quantity came to the operation {described(edge.node)!r}{self._after(edge.node)}"
        )
