"""A step that runs by the engine until it is trusted, and then as a recorded graph."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, Final

from torch import Tensor
from torch.nn import Module

from backpack_capture.code import AnotherAnswer
from backpack_capture.compiled import Compiler
from backpack_capture.engine import Asked, Outcome, run_engine
from backpack_capture.given import key_of, plain_tensors, reason_against, shown_of
from backpack_capture.graph import Graph
from backpack_capture.guard import Guard
from backpack_capture.nested import Apart, HoldsCode
from backpack_capture.recording import Refused, record
from backpack_capture.watch import Watch
from backpack_core.errors import BackpackWarning, UsageError, warn
from backpack_products.tuning import unsplit

MOST: Final = 8  # graphs that are kept: the last ones that ran
PATIENCE: Final = 4  # replays in a row that read another answer, steps that change their own form
NEW: Final = 64  # forms in a row that were met only once
EARLY: Final = (3, 5, 6, 9, 17)  # steps that may be recorded: most steps before are measured


class CaptureWarning(BackpackWarning):
    """A captured step runs by the engine: it is right, but no faster than without ``capture``.

    The message says why. ``report()`` says it again.
    """

    in_manual = True


class _Form:
    """What is known about steps with arguments of some shapes, and the present modules.

    Attributes:
        watch: What is looked at.
        guard: The state of it.
        passes: How many steps the engine ran.
        graph: The recorded step; ``None`` before it is recorded.
        delay: Why the step is not recorded yet.
        reason: Why the step will never be recorded.
    """

    def __init__(self, watch: Watch, shown: str) -> None:
        self.watch, self.guard, self.shown = watch, Guard(watch), shown
        self.passes = 0
        self.was_measured = True
        self.graph: Graph | None = None
        self.delay, self.reason = "until the structure is trusted", ""

    @property
    def is_due(self) -> bool:
        """Whether the next step is recorded."""
        after = self.passes + 1
        return after in EARLY or (not self.was_measured and not 2 < after < EARLY[-1])

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether the graph, if there is one, serves arguments in this memory."""
        return self.graph is None or self.graph.fits(given)


class CapturedStep:
    """What :func:`~backpack_capture.capture` returns. Call it like the captured function."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[Module],
        asked: Asked,
        compiler: Compiler | None = None,
    ) -> None:
        self._function, self._modules, self._asked = function, modules, asked
        self._compiler = compiler
        self._forms: OrderedDict[Hashable, list[_Form]] = OrderedDict()
        self._lock = threading.RLock()
        self._has_warned = False
        self._by_engine = self._restless = self._new = 0
        self._reason = ""

    # Running -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: forward pass, loss, backward pass with the extensions.

        Args:
            args: The function's arguments.
            kwargs: The function's keyword arguments.

        Returns:
            What the function returned, detached.
        """
        with self._lock:
            if self._reason:
                return self._run_engine(args, kwargs).returned
            given = plain_tensors(args) if not kwargs else None
            if given is None:
                try:
                    apart = Apart((args, kwargs))
                except (HoldsCode, RecursionError) as reason:
                    return self._refused(args, kwargs, f"an argument is a {reason}")
                given, form = apart.tensors, apart.form
            else:
                form = (len(args),)
            key = form, tuple([key_of(t) for t in given])
            found = self._find(key, given)
            if found is not None and found.graph is not None:
                self._forms.move_to_end(key)
                return self._replay(found, given, args, kwargs)
            returned, found = self._step(key, given, args, kwargs, found)
            self._give_up(found)
            return returned

    def _find(self, key: Hashable, given: Sequence[Tensor]) -> _Form | None:
        forms = self._forms.get(key, ())
        return next((form for form in forms if form.guard.holds() and form.fits(given)), None)

    def _step(
        self, key: Hashable, given: list[Tensor], args: Any, kwargs: Any, form: _Form | None
    ) -> tuple[Any, _Form]:
        """A step by the engine, perhaps a recorded one."""
        self._new += form is None
        if form is None:
            watch = self._new_watch()  # modules, parameters and functions may have been replaced
            form = _Form(watch, shown_of(given))
            form.reason = (
                reason_against(self._asked, given)
                or watch.reason_against(self._asked.gradient)
                or ""
            )
            self._keep(key, form)
        if form.reason:
            return self._refused(args, kwargs, form.reason), form
        if not form.is_due:
            outcome = self._run_engine(args, kwargs)
            form.passes, form.was_measured = form.passes + 1, outcome.was_measured
            return outcome.returned, form
        form.passes += 1
        is_split = self._compiler is None or self._compiler.splits
        with nullcontext() if is_split else unsplit():
            outcome, graph = record(self._function, args, kwargs, given, self._asked, form.watch)
        self._by_engine += 1
        if isinstance(graph, Graph):
            form.graph, form.guard = graph, Guard(form.watch)
            graph.note_sharing(given)
            if self._compiler is not None:
                graph.compile(self._compiler.begin, given)
        elif isinstance(graph, Refused):
            form.reason = graph.reason
            self._warn(graph.reason)
        elif form.passes == EARLY[-1]:  # a factor that hides samples may be gone after a warm-up
            form.delay = graph.reason
            self._warn(graph.reason)
        form.was_measured = True
        return outcome.returned, form

    def _give_up(self, form: _Form) -> None:
        """Give up graphs for good, if steps are never like earlier ones."""
        if form.graph is None and not form.guard.holds():
            self._restless += 1
        elif form.passes > 1 or form.reason:
            self._restless = self._new = 0
        if self._restless >= PATIENCE:
            self._reason = "it changes attributes of modules, or variables that it refers to"
        elif self._new >= NEW:
            self._reason = "its arguments, or what it refers to, are others nearly every time"
        if self._reason:
            self._forms.clear()
            self._warn(self._reason)

    def _keep(self, key: Hashable, form: _Form) -> None:
        """Store a form as the one that ran last."""
        self._forms.setdefault(key, []).append(form)
        self._forms.move_to_end(key)
        while sum(map(len, self._forms.values())) > MOST:
            oldest = next(iter(self._forms))
            self._forms[oldest].pop(0)
            if not self._forms[oldest]:
                del self._forms[oldest]

    def _run_engine(self, args: Any, kwargs: Any) -> Outcome:
        self._by_engine += 1
        return run_engine(self._function, args, kwargs, self._asked)

    def _refused(self, args: Any, kwargs: Any, reason: str) -> Any:
        self._warn(reason)
        return self._run_engine(args, kwargs).returned

    # Replaying -----------------------------------------------------------------------------------

    def _replay(self, form: _Form, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        graph = form.graph
        assert graph is not None
        if not graph.takes_gradients():
            return self._run_engine(args, kwargs).returned
        graph.go_over()
        before = graph.snapshot(given)
        graph.replays += 1
        try:
            results = graph.run(given)
        except AnotherAnswer:
            graph.reruns += 1
            graph.in_a_row += 1
            before.put_back()
            if graph.in_a_row >= PATIENCE:
                self._drop(form, "it reads numbers or shapes from values, which differ each time")
            return self._run_engine(args, kwargs).returned
        except Exception as error:
            before.put_back()
            returned = self._run_engine(args, kwargs).returned  # or the step itself is wrong
            self._drop(form, f"its graph failed, but the step did not: {_first_line(error)}")
            return returned
        graph.in_a_row = 0
        if graph.is_compared:
            before.put_back()
            return self._compare(form, results, args, kwargs)
        return graph.deliver(results)

    def _compare(self, form: _Form, results: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """Run the engine after the graph; the engine's results count."""
        graph = form.graph
        assert graph is not None
        self._by_engine += 1
        outcome, difference = graph.compare(results, self._function, args, kwargs)
        graph.compared += 1
        if difference:
            self._drop(form, f"its graph gave something other than the engine: {difference}")
        return outcome.returned

    def _drop(self, form: _Form, reason: str) -> None:
        """Drop the code that runs: the recorded graph takes over, or else the engine."""
        if form.graph is not None and form.graph.is_compiled:
            form.graph.go_back(reason)
        else:
            form.graph, form.reason = None, reason
            self._warn(reason)

    # Saying --------------------------------------------------------------------------------------

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"A captured step runs by the engine, as without capture(): {reason}. "
                "step.report() says what runs how.",
                CaptureWarning,
            )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled; the next steps run compiled code.

        Args:
            timeout: Seconds to wait at most, for each graph.

        Returns:
            Whether the compilation of every graph has ended, with or without success.
        """
        with self._lock:
            graphs = [f.graph for forms in self._forms.values() for f in forms if f.graph]
            ended = [graph.wait(timeout) for graph in graphs]
        return all(ended)

    def holds(self, *args: Tensor) -> bool:
        """Whether a step with these tensors would be replayed now, as the guard says."""
        found = self._find(((len(args),), tuple(map(key_of, args))), args)
        return found is not None and found.graph is not None

    def report(self) -> str:
        """What runs how, and why: a line for each form of the arguments."""
        lines = [f"{self!r}: {self._by_engine} steps by the engine"]
        if self._reason:
            lines.append(f"  all of them: {self._reason}")
        for form in (form for forms in self._forms.values() for form in forms):
            lines.append(f"  {form.shown}: {self._said_of(form)}")
        return "\n".join(lines)

    def _said_of(self, form: _Form) -> str:
        graph = form.graph
        if graph is None:
            return f"engine, {form.reason or form.delay}"
        said = f", {graph.said}" if graph.said else ""
        return (
            f"graph of {graph.size} operations ({graph.recorded} were recorded), {graph.replays} "
            f"replays, {graph.compared} compared with the engine, {graph.reruns} run again{said}"
        )

    @property
    def code(self) -> str:
        """The Python code of the graphs; the one that ran last comes last."""
        found = [f for forms in self._forms.values() for f in forms if f.graph is not None]
        return "\n".join([f"# {f.shown}\n{f.graph.code.text}" for f in found if f.graph])

    def __repr__(self) -> str:
        """The function and the extensions."""
        names = ", ".join(type(e).__name__ for e in self._asked.extensions)
        return f"<captured {self._function.__qualname__} with {names or 'no extensions'}>"

    def __reduce__(self) -> Any:
        """Refuse to be copied or stored.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "A captured step belongs to its modules and to this process. Copy or store the "
            "modules, and capture(...) a step of the copies."
        )

    def _new_watch(self) -> Watch:
        return Watch(self._function, self._modules, self._asked.extensions, self._asked.functions)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
