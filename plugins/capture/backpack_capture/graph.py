"""A recorded step that can be run: its code, and the places of its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from backpack_capture._torch import (
    DEVICES,
    generator_states,
    set_generator_states,
    without_gradients,
)
from backpack_capture.code import Code
from backpack_capture.compiled import Begin, Compilation, NotCompiled, Run
from backpack_capture.engine import Asked, Outcome, run_engine
from backpack_capture.nested import HoldsCode
from backpack_capture.program import Program
from backpack_capture.results import Before, Results
from backpack_capture.watch import Watch
from backpack_core.record.models import owners_of
from backpack_products.recycled import drop, will_store
from backpack_products.values import rounding_unit

LOOKS: Final = 12  # timed runs of compiled code, and as many before it; the fastest count
SLOWER: Final = 1.2


@dataclass(frozen=True)
class Snapshot:
    """The state before a step of everything that the step may change on the way."""

    generators: Sequence[Tensor]
    written: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, is_random: bool, tensors: Sequence[Tensor]) -> Snapshot:
        """Keep copies, and the state of torch's generators if the step draws numbers."""
        states = generator_states() if is_random else ()
        return cls(states, [(t, t.detach().clone()) for t in tensors])

    def put_back(self) -> None:
        """Restore the state."""
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
        recorded: The number of operations that were recorded.
        replays: How often it ran.
        compared: How often the engine ran the same step afterwards.
        reruns: How often it read another answer, so that the engine ran the step.
        in_a_row: The number of the latest consecutive runs that read another answer.
        results: The places of its results.
        compilation: What will replace the code; ``None`` for nothing.
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
        self._since = 0  # replays before the code that runs now took over
        self.compilation: Compilation | None = None
        self._is_pending, self._why_not = False, ""
        self._times, self._recorded_time = deque[float](maxlen=LOOKS), 0.0
        self.results, self._parameters = results, watch.parameters
        self._is_timed = all(p.is_cpu for p in watch.parameters)  # a device runs asynchronously
        self._models = owners_of(watch.modules)
        written = {n for op in program.operations for n in op.writes}
        roots = {program.roots[n] for n in written}
        self._places = [i for i, n in enumerate(program.given) if n in roots]
        self._written = [t for n, t in program.known.items() if n in roots]
        self._is_random, self._sharing = program.is_random, list[int]()
        self.replays = self.compared = self.reruns = self.in_a_row = self._held = 0
        self._compared_with = set[int]()  # how many gradients there were

    @property
    def is_compared(self) -> bool:
        """Whether this replay is compared: the 1st, 2nd, 4th, 8th, … of the code that runs now.

        So is the first one that finds other gradients than those before, which the step may clear.
        """
        count = self.replays - self._since
        return count & (count - 1) == 0 or self._held not in self._compared_with

    @property
    def is_compiled(self) -> bool:
        """Whether other code runs instead of the recorded one."""
        return self._run is not self.code.run

    @property
    def said(self) -> str:
        """The state of the compilation; empty if none was asked for."""
        if self._why_not:
            return f"not compiled: {self._why_not}"
        return self.compilation.said if self.compilation is not None else ""

    def compile(self, begin: Begin, given: Sequence[Tensor]) -> None:
        """Begin to compile other code, which takes over when it is ready."""
        try:
            self.compilation = begin(self.program, given)
        except NotCompiled as error:
            self._why_not = str(error)
        else:
            self._is_pending = True

    def go_over(self, least: int = LOOKS) -> None:
        """Run compiled code from now on, if it is ready, and go back if it is slower.

        Args:
            least: How many recorded runs are needed for the comparison.
        """
        if self._recorded_time and len(self._times) == LOOKS:
            ratio, self._recorded_time = min(self._times) / self._recorded_time, 0.0
            if ratio > SLOWER:
                self.go_back(f"its kernels took {ratio:.1f} times as long as recorded operations")
        is_early = self._is_timed and len(self._times) < least
        if not self._is_pending or self.compilation is None or is_early:
            return
        try:
            run = self.compilation.take()
        except NotCompiled as error:
            self.go_back(str(error))
            return
        if run is not None:
            self._run, self._since, self._is_pending = run, self.replays, False
            self._recorded_time = min(self._times, default=0.0) if self._is_timed else 0.0
            self._times.clear()

    def wait(self, timeout: float | None) -> bool:
        """Wait for compiled code, and return whether the compilation has ended."""
        if self._is_pending and self.compilation is not None:
            self.compilation.wait(timeout)
            self.go_over(0)
        return not self._is_pending

    def go_back(self, reason: str) -> None:
        """Run the recorded code from now on."""
        self._why_not, self._is_pending, self.compilation = reason, False, None
        self._run, self._since, self._recorded_time = self.code.run, self.replays, 0.0

    def note_sharing(self, given: Sequence[Tensor]) -> None:
        """Note which tensors share memory, if the step writes to any: then it is another step."""
        self._sharing = self._shared(given)

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether arguments share memory with each other, and with parameters, as noted."""
        return self._shared(given) == self._sharing

    def _shared(self, given: Sequence[Tensor]) -> list[int]:
        """For each tensor, the place of the first one in the same memory; empty if none counts."""
        if not (self._places or self._written):
            return []
        firsts = dict[int, int]()
        memories = [t.untyped_storage().data_ptr() for t in (*given, *self.program.known.values())]
        return [firsts.setdefault(memory, place) for place, memory in enumerate(memories)]

    def takes_gradients(self) -> bool:
        """Whether gradients can be added to the existing ones, which are counted."""
        self._held = 0
        for parameter, _ in self.results.gradients:
            grad = parameter.grad
            if grad is not None:
                self._held += 1
                if grad.requires_grad or grad.layout is not torch.strided:
                    return False
        return True

    def snapshot(self, given: Sequence[Tensor]) -> Snapshot:
        """What a replay may change."""
        written = [*[given[place] for place in self._places], *self._written]
        return Snapshot.of(self._is_random, written)

    def run(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the results."""
        self.results.offer()
        start = perf_counter()
        try:
            with without_gradients():
                if not any(map(torch.is_autocast_enabled, DEVICES)):
                    found = self._run(*given)
                else:
                    with ExitStack() as modes:
                        for device in DEVICES:
                            modes.enter_context(torch.autocast(device, enabled=False))
                        found = self._run(*given)
        finally:
            drop()
        self._times.append(perf_counter() - start)  # only of completed runs
        return found

    def deliver(self, tensors: Sequence[Tensor]) -> Any:
        """Store results, and return what the step returned."""
        will_store(self._models, self._asked.fields)
        with without_gradients():
            return self.results.deliver(tensors)

    def compare(
        self,
        found: Sequence[Tensor],
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> tuple[Outcome, str]:
        """Run the engine and keep its results; also return a difference, or an empty text."""
        self._compared_with.add(self._held)
        fields = self._asked.fields
        with Before(self._parameters, fields, self._models) as apart:
            outcome = run_engine(function, args, kwargs, self._asked, apart.begin)
            if apart.fault:
                return outcome, apart.fault
            try:
                right = Results(outcome.returned, self._parameters, fields, self._more)
            except (HoldsCode, RecursionError):
                return outcome, "results of another type"
            if right.form != self.results.form or right.places != self.results.places:
                return outcome, "results in other places"
            # A result in double precision may come from parameters in single precision.
            real = [p for p in self._parameters if p.is_floating_point()]
            unit = max(map(rounding_unit, real), default=0.0)
            for ours, its in zip(found, right.tensors, strict=True):
                difference = difference_of(ours, its, unit)
                if difference:
                    return outcome, difference
        return outcome, ""


def difference_of(ours: Tensor, its: Tensor, unit: float = 0.0) -> str:
    """What differs by more than rounding; empty if nothing does.

    Args:
        ours: A tensor.
        its: What it is compared with.
        unit: The rounding unit of what both come from, if that is coarser than their own.
    """
    if ours.shape != its.shape or ours.dtype != its.dtype:
        return f"{ours.dtype} {list(ours.shape)} instead of {its.dtype} {list(its.shape)}"
    if torch.equal(ours, its):
        return ""
    if not its.is_floating_point() and not its.is_complex():
        return f"whole numbers of shape {list(its.shape)}"
    allowed = max(rounding_unit(its), unit) ** 0.6
    size = its.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    if torch.allclose(ours, its, rtol=0.0, atol=float(size) * allowed, equal_nan=True):
        return ""
    return f"numbers of shape {list(its.shape)}"
