"""Records a real step of the engine; the engine's results count."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backpack_capture._torch import recorded_as_operations
from backpack_capture.code import code_of
from backpack_capture.engine import Asked, Outcome, run_engine
from backpack_capture.graph import Graph
from backpack_capture.guard import Guard
from backpack_capture.nested import HoldsCode
from backpack_capture.recorder import DISTURBED, Recorder
from backpack_capture.results import Before, Results
from backpack_capture.tidying import tidy
from backpack_capture.unseen import seen_by, states_of_generators
from backpack_capture.views import with_direct_views
from backpack_capture.watch import Watch
from backpack_core.record.models import owners_of

_HIDDEN = (
    "every pass is measured, because no pass has shown yet whether samples mix (behind a factor of "
    'zero, none can). It is recorded after one has. Or write capture(..., check="never") if you '
    "know that samples stay apart"
)


@dataclass(frozen=True)
class Refused:
    """Why a step cannot have a graph."""

    reason: str


@dataclass(frozen=True)
class NotYet:
    """Why this step has no graph; the next one may have one."""

    reason: str


def record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[Tensor],
    asked: Asked,
    watch: Watch,
) -> tuple[Outcome, Graph | Refused | NotYet]:
    """Run a step by the engine, and record what is computed.

    Args:
        function: The step.
        args: Its arguments.
        kwargs: Its keyword arguments.
        given: The tensors among them.
        asked: What the engine is asked for.
        watch: What is compared before a replay.

    Returns:
        The step's outcome, and its graph, or why it has none.
    """
    parameters = watch.parameters
    known = {id(t): t for t in watch.tensors.values()}
    if known.keys() & {*map(id, given)}:
        return run_engine(function, args, kwargs, asked), Refused("an argument is a parameter")
    before = [dict(parameter.__dict__) for parameter in parameters]
    guard, drawn = Guard(watch), states_of_generators()
    recorder = Recorder(given, [*known.values()], watch.refers_to, watch.plans)
    torch.clear_autocast_cache()
    memories = [t.untyped_storage() for t in known.values()]
    is_recurrent = any(isinstance(module, torch.nn.RNNBase) for module in watch.modules)
    with Before(parameters, asked.fields, owners_of(watch.modules)) as apart:
        with recorded_as_operations(is_recurrent), seen_by(recorder), recorder:
            outcome = run_engine(function, args, kwargs, asked, apart.begin)
        torch.clear_autocast_cache()
        more = _set_by_hook(parameters, before, asked.fields) if asked.hook is not None else []
        graph = _graph(recorder, outcome, asked, more, watch)
        if graph is not None:
            graph.results.hear(apart.order)
        reason = recorder.refusal or apart.fault or None
        if [m._cdata for m in memories] != [t.untyped_storage()._cdata for t in known.values()]:
            exchanged = "the memory of a parameter or a buffer is exchanged (tensor.data = ...)"
            reason = reason or exchanged
        reason = reason or _drawn(drawn, recorder)
    # With the hooks on gradients, which were removed until now.
    if not guard.holds():
        reason = reason or "it changes attributes of modules, or variables that it refers to"
    if outcome.was_measured:
        return outcome, NotYet(_HIDDEN)
    if reason is not None or graph is None:
        return outcome, Refused(reason or "a result is not made of tensors")
    return outcome, graph


def _graph(
    recorder: Recorder,
    outcome: Outcome,
    asked: Asked,
    more: Sequence[tuple[Tensor, str]],
    watch: Watch,
) -> Graph | None:
    """The graph of the recording; ``None``, and a reason, if it has none."""
    if recorder.refusal is not None or outcome.was_measured:
        return None
    try:
        results = Results(outcome.returned, watch.parameters, asked.fields, more)
    except (HoldsCode, RecursionError) as error:
        recorder.refusal = f"a result is a {error}, which holds code"
        return None
    program = recorder.program
    numbers = [recorder.number_of(tensor) for tensor in results.tensors]
    if None in numbers:
        return None
    # A view holds the tensor that it is a view of.
    own = {id(t) for result in results.tensors for t in (result, result._base)}
    if _is_kept(recorder, own, watch):
        gc.collect()
        if _is_kept(recorder, own, watch):
            recorder.refusal = "it keeps a tensor elsewhere than in its result"
            return None
    program.outs, program.fields = [n for n in numbers if n is not None], results.fields
    recorded = len(program.operations)
    names = {id(t): f"own_{name}" for name, t in watch.tensors.items()}
    try:
        code = code_of(with_direct_views(tidy(program)), names)
    except Exception as error:  # the step itself has finished, and is right
        recorder.refusal = f"its graph could not be written ({type(error).__name__}: {error})"
        return None
    return Graph(program, recorded, code, results, watch, asked, more)


def _is_kept(recorder: Recorder, own: set[int], watch: Watch) -> bool:
    """Whether anything but the results keeps a tensor of the step; a new plan may."""
    return any(id(t) not in own and not watch.plans(t) for t in recorder.left())


def _set_by_hook(
    parameters: Sequence[Tensor], before: Sequence[dict[str, Any]], fields: Sequence[str]
) -> list[tuple[Tensor, str]]:
    """Attributes of parameters that ``extension_hook`` has set; those of extensions are known."""
    return [
        (parameter, name)
        for parameter, old in zip(parameters, before, strict=True)
        for name, value in parameter.__dict__.items()
        if old.get(name) is not value and name not in fields and not name.startswith("_backpack")
    ]


def _drawn(drawn: Any, recorder: Recorder) -> str | None:
    """Which random numbers of a step a graph would not draw."""
    if states_of_generators() != drawn:
        return "it draws random numbers that are not torch's"
    if not recorder.is_undisturbed():
        return DISTURBED
    return None
