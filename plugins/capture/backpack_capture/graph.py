"""A recorded step that can be run: its code, and where its results belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backpack_capture._torch import (
    DEVICES,
    generator_states,
    gradient_hooks,
    set_generator_states,
    take_hooks,
)
from backpack_capture.code import Code
from backpack_capture.compiled import Begin, Compilation, NotCompiled, Run
from backpack_capture.engine import Asked, Outcome, run_engine
from backpack_capture.nested import Apart, HoldsCode
from backpack_capture.program import Program
from backpack_capture.watch import Watch
from backpack_core.engine.fields import stored_by_others
from backpack_core.record.owner import owners_of
from backpack_products.recycled import drop, offer


class Results:
    """What a step gave: what it returned, gradients, and fields, taken apart.

    Attributes:
        tensors: All tensors, each once.
        form: What else there is.
        gradients: The parameters that have a gradient, with its place among the tensors.
        fields: The places of results that are fields.
        is_heard: Whether hooks hear of gradients.
    """

    def __init__(
        self,
        returned: Any,
        parameters: Sequence[Tensor],
        fields: Sequence[str],
        more: Sequence[tuple[Tensor, str]] = (),
    ) -> None:
        """Look at the parameters.

        Args:
            returned: What the step returned.
            parameters: Those that may have results.
            fields: The names of these.
            more: Other attributes of parameters, which ``extension_hook`` has set.

        Raises:
            HoldsCode: A result has code in it.
        """
        graded = [p for p in parameters if p.grad is not None]
        stored = [(p, f) for p in parameters for f in fields if f in p.__dict__]
        stored += [(p, name) for p, name in more if name in p.__dict__]
        values = [p.__dict__[field] for p, field in stored]
        self._apart = Apart((returned, [p.grad for p in graded], values))
        self.tensors, self.form = self._apart.tensors, self._apart.form
        places = {id(t): place for place, t in enumerate(self.tensors)}
        self.gradients = [(p, places[id(p.grad)]) for p in graded]
        self._stored = [(p.__dict__, field) for p, field in stored]
        self._absent = [
            (p.__dict__, field) for p in parameters for field in fields if field not in p.__dict__
        ]
        self.places = [(id(p), field) for p, field in stored], [id(p) for p in graded]
        self.fields = [places[id(v)] for v in values if type(v) is Tensor]
        self.is_heard = False
        only = [type(value) is Tensor for value in (returned, *values)]
        self._of = [places[id(v)] for v in (returned, *values)] if all(only) else None

    def hear(self, order: Sequence[Tensor]) -> None:
        """Have hooks hear of gradients, in an order of parameters."""
        places = {id(parameter): place for place, parameter in enumerate(order)}
        self.gradients.sort(key=lambda pair: places.get(id(pair[0]), -1))
        self.is_heard = bool(order)

    def offer(self) -> None:
        """Offer the memory of the results that are there to those that replace them."""
        for table, field in self._stored:
            offer(table, field)

    def deliver(self, tensors: Sequence[Tensor]) -> Any:
        """Store the same results with other tensors; returns what the step returned."""
        if not self.is_heard:
            for parameter, place in self.gradients:
                _add(parameter, tensors[place])
        returned = self._store(tensors)
        if self.is_heard:  # hooks find the other results
            for parameter, place in self.gradients:
                accumulate(parameter, tensors[place])
        return returned

    def _store(self, tensors: Sequence[Tensor]) -> Any:
        for table, field in self._absent:
            table.pop(field, None)
        if self._of is not None:  # the most frequent case: every result is a tensor
            first, *others = self._of
            for (table, field), place in zip(self._stored, others, strict=True):
                table[field] = tensors[place]
            return tensors[first]
        returned, _, values = self._apart.put_together(tensors)
        for (table, field), value in zip(self._stored, values, strict=True):
            table[field] = value
        return returned


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to that of a parameter as autograd does: its hooks hear of it."""
    if gradient_hooks(parameter):
        torch.autograd.backward((parameter,), (gradient,))
    else:
        _add(parameter, gradient)


class GradientsApart:
    """A block in which gradients begin at none, and no hook hears of them.

    Afterwards they are added to what there was, and hooks hear of that.

    Attributes:
        order: Parameters with hooks, as their gradients came.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before: list[Tensor | None] = []
        self._put_back = list[Callable[[], None]]()
        self.order = list[Tensor]()

    def begin(self) -> None:
        """Put them aside: behind the forward pass, which may look at them."""
        self._before = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
            if gradient_hooks(parameter):
                self._put_back.append(take_hooks(parameter))
                note = parameter.register_post_accumulate_grad_hook(self.order.append)
                self._put_back.append(note.remove)

    def __enter__(self) -> GradientsApart:
        """They are as they were."""
        return self

    def __exit__(self, *error: object) -> None:
        """Add them, as autograd would have done."""
        for back in reversed(self._put_back):
            back()
        found = [p.grad for p in self._parameters]
        for parameter, old in zip(self._parameters, self._before, strict=False):
            parameter.grad = old
        with torch.no_grad():
            for parameter, new in self._in_order(found if self._before else []):
                if new is not None:
                    accumulate(parameter, new)

    def _in_order(self, found: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        places = {id(parameter): place for place, parameter in enumerate(self.order)}
        pairs = [*zip(self._parameters, found, strict=False)]
        return sorted(pairs, key=lambda pair: places.get(id(pair[0]), -1))


@dataclass(frozen=True)
class Snapshot:
    """What a step may change on the way, as it was before."""

    generators: Sequence[Tensor]
    written: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, is_random: bool, tensors: Sequence[Tensor]) -> Snapshot:
        """Keep the state of torch's generators, if numbers are drawn, and copies."""
        states = generator_states() if is_random else ()
        return cls(states, [(t, t.detach().clone()) for t in tensors])

    def put_back(self) -> None:
        """Make it what it was."""
        if self.generators:
            set_generator_states(self.generators)
        with torch.no_grad():
            for tensor, old in self.written:
                tensor.copy_(old)


class Graph:
    """A recorded step.

    Attributes:
        code: What is run.
        size: The number of its operations.
        recorded: The number of those that were recorded.
        replays: How often it ran.
        compared: How often the engine ran the same step afterwards.
        reruns: How often it read another answer, so that the engine ran the step.
        in_a_row: How often without one that did not.
        results: Where its results belong.
        compilation: What shall take the place of the code; ``None`` if nothing shall.
    """

    def __init__(
        self,
        program: Program,
        recorded: int,
        code: Code,
        results: Results,
        watch: Watch,
        asked: Asked,
        more: Sequence[tuple[Tensor, str]],
    ) -> None:
        self._asked, self._more = asked, more
        self.program, self.code = program, code
        self.size, self.recorded = len(program.operations), recorded
        self._run: Run = code.run
        self._since = 0  # replays before what runs now took over
        self.compilation: Compilation | None = None
        self._is_pending, self._why_not = False, ""
        self.results, self._parameters = results, watch.parameters
        self._models = owners_of(watch.modules)
        written = {n for op in program.operations for n in op.writes}
        roots = {program.roots[n] for n in written}
        self._places = [i for i, n in enumerate(program.given) if n in roots]
        self._written = [t for n, t in program.known.items() if n in roots]
        self._is_random = program.is_random
        self.replays = self.compared = self.reruns = self.in_a_row = 0

    @property
    def is_compared(self) -> bool:
        """Whether this replay is: of what runs now, the 1st, 2nd, 4th, 8th, …."""
        count = self.replays - self._since
        return count & (count - 1) == 0

    @property
    def is_compiled(self) -> bool:
        """Whether other code runs in the place of the recorded one."""
        return self._run is not self.code.run

    @property
    def said(self) -> str:
        """What became of compiling it; empty if nobody wanted that."""
        if self._why_not:
            return f"not compiled: {self._why_not}"
        return self.compilation.said if self.compilation is not None else ""

    def compile(self, begin: Begin, given: Sequence[Tensor]) -> None:
        """Have other code made, which takes over when it is there."""
        try:
            self.compilation = begin(self.program, given)
        except NotCompiled as error:
            self._why_not = str(error)
        else:
            self._is_pending = True

    def go_over(self) -> None:
        """Run compiled code from now on, if it is there."""
        if not self._is_pending or self.compilation is None:
            return
        try:
            run = self.compilation.take()
        except NotCompiled as error:
            self.go_back(str(error))
            return
        if run is not None:
            self._run, self._since, self._is_pending = run, self.replays, False

    def go_back(self, reason: str) -> None:
        """Run the recorded code from now on."""
        self._why_not, self._is_pending, self.compilation = reason, False, None
        self._run, self._since = self.code.run, self.replays

    def takes_gradients(self) -> bool:
        """Whether gradients can be added to those that there are."""
        for parameter, _ in self.results.gradients:
            grad = parameter.grad
            if grad is not None and (grad.requires_grad or grad.layout is not torch.strided):
                return False
        return True

    def snapshot(self, given: Sequence[Tensor]) -> Snapshot:
        """What a replay may change."""
        written = [*[given[place] for place in self._places], *self._written]
        return Snapshot.of(self._is_random, written)

    def run(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the results."""
        self.results.offer()
        try:
            with ExitStack() as modes:
                modes.enter_context(torch.no_grad())
                for device in DEVICES:
                    if torch.is_autocast_enabled(device):
                        modes.enter_context(torch.autocast(device, enabled=False))
                return self._run(*given)
        finally:
            drop()

    def deliver(self, tensors: Sequence[Tensor]) -> Any:
        """Store results; returns what the step returned."""
        stored_by_others(self._models, self._asked.fields)
        with torch.no_grad():
            return self.results.deliver(tensors)

    def compare(
        self,
        found: Sequence[Tensor],
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> tuple[Outcome, str]:
        """Run the engine, whose results stay; says what differs, if anything does."""
        with GradientsApart(self._parameters) as apart:
            outcome = run_engine(function, args, kwargs, self._asked, apart.begin)
            fields = self._asked.fields
            try:
                right = Results(outcome.returned, self._parameters, fields, self._more)
            except (HoldsCode, RecursionError):
                return outcome, "results of another type"
            if right.form != self.results.form or right.places != self.results.places:
                return outcome, "results in other places"
            for ours, its in zip(found, right.tensors, strict=True):
                difference = difference_of(ours, its)
                if difference:
                    return outcome, difference
        return outcome, ""


def difference_of(ours: Tensor, its: Tensor) -> str:
    """What differs beyond rounding; empty if nothing does."""
    if ours.shape != its.shape or ours.dtype != its.dtype:
        return f"{ours.dtype} {list(ours.shape)} in the place of {its.dtype} {list(its.shape)}"
    if torch.equal(ours, its):
        return ""
    if not its.is_floating_point() and not its.is_complex():
        return f"whole numbers of shape {list(its.shape)}"
    allowed = torch.finfo(its.dtype).eps ** 0.6
    size = its.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    if torch.allclose(ours, its, rtol=0.0, atol=float(size) * allowed, equal_nan=True):
        return ""
    return f"numbers of shape {list(its.shape)}"
