"""The smallest recipe with the same fault, found greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.nets.losses import LOSSES
from tests.nets.recipe import Plan, Recipe, Request, Settings, Step, Term
from tests.nets.scope import trap_name
from tests.nets.truth import Unstable
from tests.nets.verdict import Prepared, Verdict, judge

ATTEMPTS = 600


def shrink(
    prepared: Prepared, verdict: Verdict, judged: Callable[[Prepared], Verdict] = judge
) -> tuple[Prepared, Verdict]:
    """Drop and simplify while the outcome stays the same.

    Args:
        prepared: A recipe with a fault.
        verdict: Its fault.
        judged: What finds faults.

    Returns:
        The smallest recipe found, and what is wrong with it.
    """
    tried = {str(prepared.recipe)}
    for _ in range(ATTEMPTS):
        for recipe in _simpler(prepared.recipe):
            if len(tried) > ATTEMPTS:
                return prepared, verdict
            if str(recipe) in tried:
                continue
            tried.add(str(recipe))
            try:
                candidate = Prepared(recipe)
            except Unstable:
                continue
            found = judged(candidate)
            if _signature(candidate, found) == _signature(prepared, verdict):
                prepared, verdict = candidate, found
                break
        else:
            break
    return prepared, verdict


def _signature(prepared: Prepared, verdict: Verdict) -> tuple[object, ...]:
    trap = trap_name(prepared.recipe), prepared.truth.traps
    return verdict.outcome, verdict.what, trap


def _simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with a little less, the largest cuts first."""
    yield from _fewer_requests(recipe)
    if recipe.plan != Plan(outer=recipe.plan.outer):
        yield recipe.with_(plan=Plan(outer=recipe.plan.outer))
        yield recipe.with_(plan=replace(recipe.plan, is_inside=False))
        yield recipe.with_(plan=replace(recipe.plan, budget=0))
        yield recipe.with_(plan=replace(recipe.plan, passes="single"))
        yield recipe.with_(plan=replace(recipe.plan, hook_acts_at=1))
    yield recipe.with_(plan=replace(recipe.plan, outer=""))
    for k in range(len(recipe.terms)):
        if len(recipe.terms) > 1:
            yield recipe.with_(terms=recipe.terms[:k] + recipe.terms[k + 1 :])
    yield from _fewer_steps(recipe)
    are_lists = any(source.lengths for source in recipe.sources.values())
    for batch in range(1 + are_lists, recipe.batch):  # one tensor is no list of samples
        yield recipe.with_(batch=batch)
    yield from _simpler_terms(recipe)
    yield from _simpler_steps(recipe)
    yield from _simpler_sources(recipe)


def _fewer_requests(recipe: Recipe) -> Iterator[Recipe]:
    requests = recipe.requests
    if len(requests) > 1:
        for request in requests:
            yield recipe.with_(requests=(request,))
        for k in range(len(requests)):
            yield recipe.with_(requests=requests[:k] + requests[k + 1 :])
    for k, request in enumerate(requests):
        for option in ("subsampling", "chunk_size"):
            if option in request.options:
                options = {n: v for n, v in request.options.items() if n != option}
                simpler = Request(request.name, options)
                yield recipe.with_(requests=(*requests[:k], simpler, *requests[k + 1 :]))


def _fewer_steps(recipe: Recipe) -> Iterator[Recipe]:
    for k in reversed(range(len(recipe.steps))):
        step = recipe.steps[k]
        rest = recipe.steps[:k] + recipe.steps[k + 1 :]
        for name in dict.fromkeys(step.inputs):
            renamed = dict.fromkeys(step.outputs, name)
            yield recipe.with_(
                steps=tuple(_rename(s, renamed) for s in rest),
                terms=tuple(replace(t, value=renamed.get(t.value, t.value)) for t in recipe.terms),
            )


def _rename(step: Step, names: dict[str, str]) -> Step:
    return replace(step, inputs=tuple(names.get(name, name) for name in step.inputs))


def _simpler_terms(recipe: Recipe) -> Iterator[Recipe]:
    for k, term in enumerate(recipe.terms):
        simpler = [replace(term, scale=1.0)]
        if term.kind in LOSSES:
            reduction = {"reduction": term.settings["reduction"]}
            simpler += [
                replace(term, by_hand="", settings={**term.settings, "reduction": "sum"}),
                replace(term, settings=reduction),
                Term(term.value, "MSE", reduction, by_hand=term.by_hand, part=term.part),
                Term(term.value, "MSE", {"reduction": "sum"}, part=term.part),
            ]
        for other in simpler:
            if other != term:
                yield recipe.with_(terms=(*recipe.terms[:k], other, *recipe.terms[k + 1 :]))


def _simpler_steps(recipe: Recipe) -> Iterator[Recipe]:
    for k, step in enumerate(recipe.steps):
        for settings in _simpler_settings(step.settings):
            simpler = replace(step, settings=settings)
            yield recipe.with_(steps=(*recipe.steps[:k], simpler, *recipe.steps[k + 1 :]))
        if step.part and len(step.inputs) == 1 and step.kind != "Linear":
            simpler = replace(step, kind="Linear", settings={"out": 2, "bias": False})
            yield recipe.with_(steps=(*recipe.steps[:k], simpler, *recipe.steps[k + 1 :]))


def _simpler_settings(settings: Settings) -> Iterator[dict[str, Any]]:
    for name, value in settings.items():
        rest = {n: v for n, v in settings.items() if n != name}
        if name in {"checkpoint", "frozen", "tie", "no_grad", "mode"}:
            yield rest
        elif value is True:
            yield {**settings, name: False}
        elif isinstance(value, int) and value > 1 and name != "axis":
            for less in range(1, value):
                yield {**settings, name: less}


def _simpler_sources(recipe: Recipe) -> Iterator[Recipe]:
    used = {name for step in recipe.steps for name in step.inputs}
    used |= {term.value for term in recipe.terms}
    for name, source in recipe.sources.items():
        if name not in used:
            yield recipe.with_(sources={n: s for n, s in recipe.sources.items() if n != name})
        if source.requires_grad:
            simpler = replace(source, requires_grad=False)
            yield recipe.with_(sources={**recipe.sources, name: simpler})
        for axis, length in enumerate(source.shape):
            for less in range(1, length):
                shape = (*source.shape[:axis], less, *source.shape[axis + 1 :])
                simpler = replace(source, shape=shape)
                yield recipe.with_(sources={**recipe.sources, name: simpler})
