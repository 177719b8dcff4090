"""A chain of modules with rules: calls lead to calls, and samples are on axis 0.

What functions make of the last calls may be anything, as long as nothing has to go through it. For
everything else there is a library, which is named where it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from backpack_core._torch import Node, has_memory
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.active import Context
from backpack_core.engine.between import Between
from backpack_core.engine.losses import nothing_arrived
from backpack_core.engine.schedule import Schedule
from backpack_core.engine.sink import FieldSink
from backpack_core.engine.traversal import Traversal
from backpack_core.errors import BackpackError, MissingPluginError, SampleMixingError
from backpack_core.graph.nodes import described, is_leaf
from backpack_core.graph.survey import Survey
from backpack_core.plan.structure import Structure
from backpack_core.plugins.loading import missing
from backpack_core.plugins.manager import hooks
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Call, CallCaches, Edge, Site, has_call, site_at
from backpack_core.record.owner import OWNER_ATTRIBUTE, computed_substitutes, is_parameter
from backpack_core.record.run import NO_RUN, Run
from backpack_core.record.view import View


def between() -> type[Between[Any]]:
    """The library's class, or core's own where no library is installed."""
    return _between(registry.generation)


@lru_cache(maxsize=1)
def _between(generation: int) -> type[Between[Any]]:
    """The same, as long as plugins do not change."""
    found: type[Between[Any]] | None = hooks.backpack_operation()
    return Chain if found is None else found


def needs_operations(what: str) -> MissingPluginError:
    """The error for what core alone does not know."""
    return missing(
        f"{what}. Core alone knows chains of modules with layer rules, with samples on axis 0. "
        "Install backpack-operations, which knows operations between modules and where samples "
        "lie: pip install backpack-operations.",
        "operations",
    )


def mixing(what: str, further: str = "") -> BackpackError:
    """A call, or an operation between calls, mixes samples."""
    return SampleMixingError(
        f"{what} makes every sample of the batch influence every other (a batch normalisation in "
        "train mode does, and a softmax over axis 0), so per-sample quantities do not exist. Call "
        f"model.eval(), or use a layer that treats samples one by one, as GroupNorm.{further}"
    )


class Chain(Between[Survey]):
    """A chain of modules with rules."""

    def __init__(self, context: Context, asked: Sequence[Propagator], survey: Survey) -> None:
        super().__init__(context, asked, survey)
        self._run: Run = NO_RUN  # of the model
        self._mixing: list[BackpackError] = []

    @classmethod
    def of(cls, context: Context, asked: Sequence[Propagator]) -> Chain:
        """An empty one."""
        return cls(context, asked, Survey())

    @staticmethod
    def told(samples: Any) -> Any:
        """Nothing is known of rows.

        Raises:
            MissingPluginError: Always.
        """
        raise needs_operations("backpack(samples=...) says which rows belong to which sample")

    def look_behind(self, edges: list[Edge]) -> None:
        """Walk from call to call."""
        if self.context.beside:
            raise needs_operations("backpack(beside=[...]) leaves out a part of the graph")
        if computed_substitutes():
            raise needs_operations("Weights are handed over, as by torch.func.functional_call")
        is_late, todo = bool(self.survey.sites), self._below(edges)
        while todo:
            site = todo.pop()
            if (site.call, site.index) not in self.survey.sites and not site.call.is_released:
                todo += self._enter(site)
        if is_late and self.survey.is_shared:
            raise needs_operations("Parameters have uses that came up after others were read")

    def _below(self, roots: list[Edge]) -> list[Site]:
        """The last calls, below what functions make of them."""
        found: list[Site] = []
        todo, seen = [edge.node for edge in roots if not has_call(edge.node)], set[Node]()
        found += [self._site_at(edge, "backward()") for edge in roots if has_call(edge.node)]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for child, number in node.next_functions:
                if child is None:
                    continue
                if has_call(child):
                    found.append(self._site_at(Edge(child, number), described(node)))
                elif not is_leaf(child):
                    todo.append(child)
                elif is_parameter(child.variable):  # type: ignore[attr-defined]
                    what = f"The operation {described(node)!r} uses a parameter"
                    raise needs_operations(f"{what} of shape {[*child.variable.shape]}")  # type: ignore[attr-defined]
        return found

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

    def _enter(self, site: Site) -> list[Site]:
        """Note a call; returns where to go on."""
        call, survey = site.call, self.survey
        survey.structure = None
        survey.sites[call, site.index] = site
        survey.note_uses(call)
        if why := self._why_other(call, site.index):
            raise needs_operations(f"{call.path} {why}")
        stored = call.stored
        survey.batch_size = survey.batch_size or len(stored.inputs[0])
        survey.widest = max(survey.widest, *[t.nbytes for t in (*stored.inputs, *stored.outputs)])
        if call.rule.mixes_samples(View(call, site.index)):
            self._mixing.append(mixing(call.path))
        return [self._site_at(edge, call.path) for edge in call.edges if edge is not None]

    def _why_other(self, call: Call, index: int) -> str:
        """What a call has that chains have not; empty if nothing."""
        rule, stored, survey = call.rule, call.stored, self.survey
        if rule.transparent:
            return "has no layer rule, so that what it does are operations"
        if call in survey.freed:
            return f"has a parameter {survey.freed[call][0].name!r} that its layer rule leaves out"
        if stored.computed or any(map(is_parameter, stored.inputs)):
            return "has parameters that are computed, or given as arguments"
        if call.is_rewired or call.module._modules:
            return "changed a view in place" if call.is_rewired else "has modules inside"
        if not call.edges or not all(map(has_memory, (*stored.inputs, *stored.outputs))):
            return "received no tensor, or a nested or sparse one"
        if rule.batch_axis(View(call, index), index) or _is_declared(call):
            return "has its samples on another axis than the first"
        rows = stored.inputs[0].shape[:1].numel() if stored.inputs[0].dim() else 0
        returned = stored.outputs[index].shape[:1]
        if not rule.is_loss and (not returned or returned[0] != rows):
            return f"received {rows} rows and returned {[*returned]}"
        if not rows or rows != (survey.batch_size or rows):
            return f"received {rows} rows, and other modules {survey.batch_size}"
        return "" if rule.is_loss else self._why_other_run(call, rows)

    def _why_other_run(self, call: Call, rows: int) -> str:
        """What its model received that tells other samples; empty if nothing."""
        run = call.run
        if run is NO_RUN:
            return ""
        if self._run is NO_RUN:
            self._run = run
        if run is not self._run:
            return "ran in another call of the model than others"
        if run.sizes and (run.sizes != (rows,) or len(run.inputs) > 1):
            return f"received {rows} rows, and its model {' and '.join(map(str, run.sizes))}"
        if run.sizes and not any(call.edges) and call.receives_input < 2:
            return "received something else than its model did"
        return ""

    def see_through(self, edges: list[Edge]) -> None:
        """Raise if samples influence each other."""
        if self._mixing and any(propagator.per_sample for propagator in self.asked):
            raise self._mixing[0]

    def refuse_terms(
        self,
        roots: Sequence[Edge],
        of_losses: Sequence[Extension],
        divided: Sequence[Extension],
        is_inside: bool,
    ) -> None:
        """Raise unless it is called on an extended loss itself."""
        for extension in (*of_losses, *divided):
            name = type(extension).__name__
            for edge in roots:
                site = self._site_at(edge, name)
                if not site.call.rule.is_loss:
                    raise nothing_arrived(View(site.call, site.index), name)

    def nonlinear(self) -> list[Node]:
        """There are no operations."""
        return []

    def facts_of(self, node: Node) -> Sequence[Any]:
        """No decision depends on what functions make of the last calls."""
        return ()

    def numbered(self, structure: Structure) -> Any:
        """Calls are all there is."""
        return

    def fill(self, numbers: Any, structure: Structure) -> None:
        """Nothing to do."""
        return

    def traversal(self, schedule: Schedule, sink: FieldSink, kept: CallCaches) -> Traversal:
        """All columns go through at once."""
        return Traversal(schedule, sink)

    def leave(self, schedule: Schedule, lane: int, edge: Edge, wide: Any, own: Any) -> None:
        """It has been seen that there is a call at every edge.

        Raises:
            MissingPluginError: There is none.
        """
        raise needs_operations(
            f"A quantity came to the operation {described(edge.node)!r}{self._after(edge.node)}"
        )

    def cross(self, schedule: Schedule, node: Node, grads: Sequence[Any] = ()) -> None:
        """Nothing waits at nodes."""
        return


def _is_declared(call: Call) -> bool:
    """Whether ``extend`` was told of axes."""
    owner = call.module.__dict__.get(OWNER_ATTRIBUTE)
    return bool(owner is not None and owner.axes and not call.rule.is_loss)
