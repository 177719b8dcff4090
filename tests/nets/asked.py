"""Draws what is asked of a net: losses, extensions, and the passes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Protocol

from tests.nets.catalogue import KINDS
from tests.nets.kinds import Unfit
from tests.nets.losses import LOSSES, OUTER
from tests.nets.passes import CHANGING, PASSES
from tests.nets.quantities import QUANTITIES, draw_options
from tests.nets.recipe import Plan, Recipe, Request, Shape, Step, Term
from tests.nets.terms import BESIDE

# Most numbers that a sample's outputs may have: the columns of exact curvature.
OUTPUTS = 8


class Draft(Protocol):
    """A net under construction (:class:`tests.nets.draw.Draft`)."""

    random: Random
    recipe: Recipe
    is_smooth: bool
    is_tame: bool
    is_frozen: bool

    @property
    def numbers(self) -> list[str]:
        """Names of the values that are real numbers."""

    def shape(self, name: str) -> Shape:
        """Shape of a value without the batch axis."""

    def accept(self, step: Step) -> bool:
        """Append a step if it works."""


def size(shape: Shape) -> int:
    """Number of entries."""
    result = 1
    for length in shape:
        result *= length
    return result


def _append(draft: Draft, step: Step) -> str:
    if not draft.accept(step):
        raise Unfit
    return draft.recipe.steps[-1].outputs[0]


def _head(draft: Draft) -> str:
    """A value that is small enough for a loss, most often the last one."""
    names = [n for n in draft.numbers if n not in draft.recipe.sources]
    if not names:
        raise Unfit
    latest = 0.97 if draft.is_tame else 0.8
    name = names[-1] if draft.random.random() < latest else draft.random.choice(names)
    part = f"head{len(draft.recipe.steps)}"
    has_parts = any(step.part for step in draft.recipe.steps) and not draft.is_frozen
    # One entry of a loss for each item says that items are samples.
    may_merge = not (draft.is_tame or any(s.lengths for s in draft.recipe.sources.values()))
    if may_merge and len(draft.shape(name)) > 1 and draft.random.random() < 0.35:
        settings = KINDS["MergedHead"].draw(draft.random, (draft.shape(name),))
        return _append(draft, Step("MergedHead", (name,), (), settings, part))
    if size(draft.shape(name)) > OUTPUTS or draft.random.random() < 0.3 or not has_parts:
        if len(draft.shape(name)) > 1:
            name = _append(draft, Step("reshape", (name,), (), {"shape": [-1]}))
        settings = {"out": draft.random.randint(2, 4 if draft.is_tame else 6), "bias": True}
        part = f"head{len(draft.recipe.steps)}"
        name = _append(draft, Step("Linear", (name,), (), settings, part))
    return name


def _term(draft: Draft, number: int) -> Term:
    random, name = draft.random, _head(draft)
    kinds = [k for k, kind in LOSSES.items() if kind.has_curvature or not draft.is_smooth]
    kind = random.choices(kinds, [LOSSES[k].weight for k in kinds])[0]
    settings = LOSSES[kind].draw(random, draft.shape(name))
    before = LOSSES[kind].before
    if before is not None:
        name = _append(draft, Step(before[0], (name,), (), before[1]))
    reduction = random.choices(["mean", "sum", "none"], [0.5, 0.3, 0.2])[0]
    if kind == "CrossEntropy" and "soft" not in settings and random.random() < 0.25:
        settings["picked"] = random.choice(["mask", "pairs", "flat"])
    return Term(
        name,
        kind,
        {**settings, "reduction": reduction},
        scale=random.choices([1.0, 0.5, 3.0, -1.0], [0.6, 0.2, 0.18, 0.02])[0],
        by_hand=random.choice(["sum", "mean", "weighted"]) if reduction == "none" else "",
        part=f"loss{number}",
    )


def draw_terms(draft: Draft) -> tuple[Term, ...]:
    """One to three losses.

    Raises:
        Unfit: A loss makes no sense for the value it would read.
    """
    terms: list[Term] = []
    for number in range(draft.random.choices([1, 2, 3], [0.75, 0.2, 0.05])[0]):
        if terms and draft.random.random() < 0.25:
            term = terms[0]  # the same module once more, on the same value or on one like it
            fitting = [n for n in draft.numbers if draft.shape(n) == draft.shape(term.value)]
            if LOSSES[term.kind].before is None:
                term = replace(term, value=draft.random.choice(fitting or [term.value]))
            terms.append(term)
            continue
        terms.append(_term(draft, number))
    values = {term.value for term in terms}
    if sum(size(draft.shape(name)) for name in values) > 2 * OUTPUTS:
        raise Unfit
    return tuple(terms)


def trap_the_loss(draft: Draft, terms: tuple[Term, ...]) -> tuple[tuple[Term, ...], Plan]:
    """Hide from the losses what they are a part of.

    Args:
        draft: The net.
        terms: The losses.

    Returns:
        The terms, and a plan with a function of their sum.

    Raises:
        Unfit: The trap that was chosen needs other losses.
    """
    random, first = draft.random, terms[0]
    trap = random.choice(["beside", "beside", "module", "module", "outer", "merged", "logsumexp"])
    if trap == "outer":
        return terms, Plan(outer=random.choice([name for name in OUTER if name]))
    if trap in {"beside", "module"}:
        kinds = sorted(k for k in BESIDE if trap == "beside" or BESIDE[k].trap != "weights")
        beside = Term(first.value, random.choice(kinds), scale=0.3, part="own")
        if beside.kind == "contrastive" and size(draft.shape(first.value)) == 1:
            raise Unfit  # numbers of length one have no direction
        if trap == "beside":
            return random.choice([(*terms, beside), (beside, *terms)]), Plan()
        return _with_own_module(random, terms, replace(beside, settings={"module": True}))
    if trap == "logsumexp":
        settings = {**first.settings, "reduction": "none"}
        return (replace(first, settings=settings, by_hand="logsumexp"), *terms[1:]), Plan()
    is_flat = trap == "merged" and len(draft.shape(first.value)) == 1
    if is_flat or first.kind != "CrossEntropy" or "soft" in first.settings:
        raise Unfit
    return (replace(first, settings={**first.settings, trap: True}), *terms[1:]), Plan()


def _with_own_module(
    random: Random, terms: tuple[Term, ...], own: Term
) -> tuple[tuple[Term, ...], Plan]:
    """A loss module without a rule: alone, a root or a multiple of it, or beside the others."""
    if random.random() < 0.3:
        return (*terms, own), Plan()
    outer = random.choice([name for name in OUTER if name]) if random.random() < 0.3 else ""
    return (replace(own, scale=random.choice([1.0, 1.0, 3.0])),), Plan(outer=outer)


def _names(random: Random, draft: Draft, terms: tuple[Term, ...]) -> list[str]:
    by_family: dict[str, list[str]] = {}
    for name, quantity in QUANTITIES.items():
        by_family.setdefault(quantity.family, []).append(name)
    first = random.sample(by_family["first"], random.randint(1, 4))
    has_curvature = all(LOSSES[term.kind].has_curvature for term in terms)
    is_extended = all(term.kind != "functional" for term in terms)
    if not is_extended or (not has_curvature and random.random() < 0.9):
        return first
    ggn = random.sample(by_family["ggn"], random.randint(1, 3))
    if draft.is_smooth:
        hessian = random.sample(by_family["hessian"], random.randint(1, 2))
        return [*hessian, *random.choice([[], first[:1], ggn[:1]])]
    return random.choice([first, ggn, [*first, *ggn]])


def draw_requests(random: Random, draft: Draft, terms: tuple[Term, ...]) -> tuple[Request, ...]:
    """Extensions for one backward pass, in random order."""
    names = _names(random, draft, terms)
    random.shuffle(names)
    requests = [Request(n, draw_options(n, random, draft.recipe.batch)) for n in names]
    if "BatchGrad" in names and random.random() < 0.1:
        requests.append(Request("BatchGrad", {"savefield": "second"}))
    if any("tie" in step.settings for step in draft.recipe.steps):
        # A parameter of two modules belongs to no layer.
        requests = [r for r in requests if r.options.get("clipping") != "per_layer"]
    if not requests:
        raise Unfit
    return tuple(requests)


def draw_plan(draft: Draft, requests: tuple[Request, ...]) -> Plan:
    """The passes, and the memory that they may take."""
    random, passes = draft.random, "single"
    if random.random() < 0.5:
        passes = random.choice([name for name in PASSES if name != "single"])
    if any("checkpoint" in step.settings for step in draft.recipe.steps) and passes in CHANGING:
        passes = "single"
    if passes == "differentiable" and any(
        step.kind == "Derivative" and step.settings["name"] != "attention"
        for step in draft.recipe.steps
    ):
        passes = "single"  # torch's own third derivative of norms is wrong (docs/checks.md)
    if passes == "for_some" and any(r.name == "ClippedSumGrad" for r in requests):
        passes = "single"  # whose norms are meant is a matter of its own
    if passes == "told" and any("subsampling" in r.options for r in requests):
        passes = "single"  # these are numbers of rows
    if passes == "told" and any(source.lengths for source in draft.recipe.sources.values()):
        passes = "single"  # an index has an entry for each tensor, then
    budget = random.choice([1, 64, 300, 2000]) if random.random() < 0.4 else 0
    return Plan(passes, budget, random.randint(1, 6))
