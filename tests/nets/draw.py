"""Draws recipes: steps one by one, each tried at once; then losses, extensions and a plan."""

from __future__ import annotations

import warnings
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.nets.asked import draw_plan, draw_requests, draw_terms, trap_the_loss
from tests.nets.catalogue import KINDS
from tests.nets.kinds import Kind, Unfit
from tests.nets.net import DrawnNet, Values, build, data, shape_of
from tests.nets.recipe import Plan, Recipe, Shape, Source, Step
from tests.nets.truth import Unstable, fresh
from tests.nets.verdict import Prepared

# Most numbers that a value may have for each sample, largest entry, most steps.
LARGEST = 48
BOUND = 50.0
STEPS = 12
ATTEMPTS = 60
# Ways to run the passes of nets with a trap. Nothing notices one where nothing is measured.
OF_TRAPS = ["unmeasured", "unmeasured", "after_interruption", "after_failure", "after_another"]


class Draft:
    """A net under construction: its steps, and the values that they gave."""

    def __init__(self, random: Random, seed: int, is_tame: bool = False) -> None:
        """Draw the inputs.

        Args:
            random: Where choices come from.
            seed: That of the recipe.
            is_tame: Draw ordinary steps only, and often as many positions as samples.
        """
        self.random = random
        self.is_tame = is_tame
        self.batch = random.choice([1, 2, 2, 3, 3, 3, 4, 5])
        if is_tame and random.random() < 0.8:
            self.batch = max(self.batch, 2)
        self.recipe = Recipe(seed, self.batch, draw_sources(random, self.batch, is_tame))
        self.net = DrawnNet(self.recipe)
        self.values: Values = dict(zip(self.recipe.sources, data(self.recipe), strict=True))
        self.is_smooth = random.random() < 0.25
        self.is_frozen = False

    @property
    def numbers(self) -> list[str]:
        """Names of the values that are real numbers."""
        tensors = [(n, v) for n, v in self.values.items() if n not in self.lists]
        return [n for n, v in tensors if v.is_floating_point() and len(v) == self.batch]

    @property
    def lists(self) -> list[str]:
        """Names of the inputs with one tensor for each sample."""
        return [name for name, source in self.recipe.sources.items() if source.lengths]

    def shape(self, name: str) -> Shape:
        """Shape of a value without the batch axis."""
        return shape_of(self.values[name])

    def draw_step(self) -> None:
        """Try steps until one fits."""
        for _ in range(ATTEMPTS):
            is_new = self.is_tame or self.random.random() > 0.1
            try:
                step = self._new(self._kind()) if is_new else self._again()
            except Unfit:
                continue
            if self.accept(step):
                return

    def freeze(self) -> None:
        """Freeze all that was drawn, as of a model whose last layer alone is trained."""
        self.is_frozen = True
        steps = self.recipe.steps
        frozen = [replace(s, settings={**s.settings, "frozen": "all"}) for s in steps if s.part]
        by_outputs = {step.outputs: step for step in frozen}
        self.recipe = self.recipe.with_(steps=tuple(by_outputs.get(s.outputs, s) for s in steps))
        for parameter in self.net.parameters():
            parameter.requires_grad_(False)

    def draw_trap(self) -> None:
        """Try traps until one fits.

        Raises:
            Unfit: None does.
        """
        kinds = [kind for kind in KINDS.values() if "trap" in kind.traits]
        for _ in range(ATTEMPTS):
            kind = self.random.choices(kinds, [kind.weight for kind in kinds])[0]
            try:
                if self.accept(self._new(kind)):
                    return
            except Unfit:
                continue
        raise Unfit

    def _new(self, kind: Kind) -> Step:
        inputs = self._inputs(kind)
        settings = kind.draw(self.random, tuple(map(self.shape, inputs)))
        part = f"p{len(self.recipe.steps)}" if kind.make else ""
        settings.update(self._options(kind, inputs))
        return Step(kind.name, inputs, (), settings, part)

    def _kind(self) -> Kind:
        wants_items = bool(self.lists) and (self.random.random() < 0.1 or not self.numbers)
        wants_tokens = bool(self._tokens) and (self.random.random() < 0.12 or not self.numbers)
        wants_tokens &= not wants_items
        strict = self.is_smooth and self.random.random() < 0.97
        kinds = [
            kind
            for kind in KINDS.values()
            if ("tokens" in kind.traits) == wants_tokens
            and ("items" in kind.traits) == wants_items
            and not kind.traits & {"trap", "head"}
            and ("hessian" in kind.traits or not strict)
            and (not self.is_tame or kind.is_tame)
        ]
        return self.random.choices(kinds, [kind.weight for kind in kinds])[0]

    @property
    def _tokens(self) -> list[str]:
        tensors = [(n, v) for n, v in self.values.items() if n not in self.lists]
        return [n for n, v in tensors if not v.is_floating_point()]

    def _inputs(self, kind: Kind) -> tuple[str, ...]:
        if kind.traits & {"tokens", "items"}:
            return (self.random.choice(self._tokens if "tokens" in kind.traits else self.lists),)
        numbers = self.numbers
        if not numbers:
            raise Unfit
        latest = 0.9 if self.is_tame else 0.6
        first = numbers[-1] if self.random.random() < latest else self.random.choice(numbers)
        if "source" in kind.traits and self.random.random() < 0.5:
            first = numbers[0]
        if kind.arity == 1:
            return (first,)
        others = [n for n in numbers if n != first or self.random.random() < 0.1]
        if "matching" in kind.traits:
            others = [n for n in others if self.shape(n) == self.shape(first)]
        if not others:
            raise Unfit
        return (first, self.random.choice(others))

    def _options(self, kind: Kind, inputs: tuple[str, ...]) -> dict[str, Any]:
        """What any step may have besides the settings of its kind."""
        options: dict[str, Any] = {}
        if self.is_tame or "items" in kind.traits:
            return options
        if kind.name == "Linear" and self.random.random() < 0.15:
            options.update(self._tied(self.shape(inputs[0])[-1]))
        if kind.make and self.random.random() < 0.1:
            options["frozen"] = self.random.choice(["all", "bias", "weight"])
        if "in_place" not in kind.traits:
            if kind.make and not self.is_smooth and self.random.random() < 0.06:
                place = self.random.choice(["before", "after"])
                options["silent"] = f"{place}, {self.random.choice(['first', 'last'])}"
            if self.random.random() < 0.04 and kind.name != "Derivative":
                options["checkpoint"] = True
            elif self.random.random() < 0.02:
                options["no_grad"] = True
        return options

    def _tied(self, width: int) -> dict[str, Any]:
        for step in self.recipe.steps:
            weight = getattr(self.net.part(step), "weight", None)
            if step.kind == "Linear" and weight is not None and weight.shape[1] == width:
                return {"tie": step.part, "out": len(weight)}
        return {}

    def _again(self) -> Step:
        """A module that was called before, on another value."""
        steps = [s for s in self.recipe.steps if s.part and len(s.inputs) == 1]
        if not steps:
            raise Unfit
        step = self.random.choice(steps)
        shape = self.shape(step.inputs[0])
        are_lists = step.inputs[0] in self.lists
        fitting = [
            n for n in self.values if self.shape(n) == shape and (n in self.lists) == are_lists
        ]
        return Step(step.kind, (self.random.choice(fitting),), (), step.settings, step.part)

    def accept(self, step: Step) -> bool:
        """Run a step, and keep it if it gives something to go on with."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._accept(step)

    def _accept(self, step: Step) -> bool:
        known, before = {*self.net.parts, *self.net._parameters}, self.recipe
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                found = self._try(step)
        except (Unfit, RuntimeError, ValueError, IndexError):
            self._forget(known)
            return False
        step = replace(step, outputs=tuple(found))
        self.recipe = before.with_(steps=(*before.steps, step))
        if "in_place" in KINDS[step.kind].traits and not self._is_differentiable():
            self.recipe = before
            self._forget(known)
            return False
        self.values.update(found)
        return True

    def _forget(self, known: set[str]) -> None:
        """Remove the module or parameter of a step that was not kept."""
        for name in set(self.net.parts) - known:
            del self.net.parts[name]
        for name in set(self.net._parameters) - known:
            del self.net._parameters[name]

    def _try(self, step: Step) -> Values:
        self.net.make_part(step, self.recipe.seed, self.values)
        outputs = tuple(f"v{len(self.recipe.steps)}{letter}" for letter in ("", "b", "c", "d"))
        found = self.net.execute(replace(step, outputs=outputs), self.values)
        if not all(map(self._is_fine, found.values())):
            raise Unfit
        return found

    def _is_fine(self, value: Tensor) -> bool:
        shape = value.shape
        if len(shape) not in {2, 3, 4} or len(value) % self.batch:
            return False
        if not 0 < value[0].numel() <= LARGEST or not value.is_floating_point():
            return False
        return bool(torch.isfinite(value).all()) and value.abs().max().item() < BOUND

    def _is_differentiable(self) -> bool:
        """Whether what was overwritten is needed by nobody."""
        try:
            net = build(self.recipe)
            values: Values = dict(zip(net.sources, fresh(data(self.recipe)), strict=True))
            for step in self.recipe.steps:
                values.update(net.execute(step, values))
            made = [v for n, v in values.items() if n not in self.lists]
            total = [v.sum() for v in made if v.requires_grad]
            if total:
                torch.stack(total).sum().backward()
        except RuntimeError:
            return False
        return True


def draw_sources(random: Random, batch: int = 0, is_tame: bool = False) -> dict[str, Source]:
    """One or two inputs.

    Args:
        random: Where choices come from.
        batch: The number of samples.
        is_tame: Whether sequences have this length more often than others.
    """
    sources, length = {}, batch if is_tame else 0
    families = ["flat", "flat", "sequence", "sequence", "sequence", "image", "image", "tokens"]
    families += [] if is_tame or batch < 2 else ["items"]  # one tensor is no list of samples
    for number in range(random.choice([1, 1, 1, 2])):
        family = "sequence" if length and random.random() < 0.6 else random.choice(families)
        requires_grad = not length and random.random() < 0.05
        positions = length if random.random() < 0.6 and length > 1 else random.randint(2, 5)
        if family == "flat":
            shape: Shape = (random.randint(2, 6),)
        elif family == "sequence":
            shape = (positions, random.randint(2, 4))
        elif family == "image":
            shape = (random.randint(1, 3), random.randint(3, 4), random.randint(3, 4))
        else:
            shape = (positions,)
        if family == "items":
            lengths = tuple(random.randint(1, 4) for _ in range(5))
            sources[f"x{number}"] = Source((random.randint(2, 4),), lengths=lengths)
            continue
        tokens = 4 if family == "tokens" else 0
        sources[f"x{number}"] = Source(shape, tokens, requires_grad and not tokens)
    return sources


def draw(seed: int) -> Prepared:
    """A recipe that plain autograd can run, with what it should give.

    Args:
        seed: Everything follows from it.
    """
    random = Random(seed)
    while True:
        draft = Draft(random, seed)
        for _ in range(random.randint(1, STEPS)):
            draft.draw_step()
        if random.random() < 0.1:
            draft.freeze()
        try:
            terms = draw_terms(draft)
            requests = draw_requests(random, draft, terms)
            plan = draw_plan(draft, requests)
            plan = replace(plan, is_inside=random.random() < 0.05)
            return Prepared(draft.recipe.with_(terms=terms, requests=requests, plan=plan))
        except (Unfit, Unstable):
            continue


def draw_with_trap(seed: int) -> Prepared:
    """The same of a tame net with one trap.

    Args:
        seed: Everything follows from it.
    """
    random = Random(seed)
    while True:
        draft = Draft(random, seed, is_tame=True)
        place = random.choice(["step", "step", "step", "loss"])
        try:
            draft.draw_step()
            draft.accept(
                Step("Linear", (draft.numbers[-1],), (), {"out": 3, "bias": True}, "first")
            )
            for _ in range(random.randint(0, 1)):
                draft.draw_step()
            if place == "step":
                draft.draw_trap()
            for _ in range(random.randint(0, 3)):
                draft.draw_step()
            terms, plan = draw_terms(draft), Plan()
            requests = draw_requests(random, draft, terms)
            if place == "loss":
                terms, plan = trap_the_loss(draft, terms)
            elif random.random() < 0.3:
                plan = Plan(random.choice(OF_TRAPS))
            plan = replace(plan, is_inside=random.random() < 0.1)
            return Prepared(draft.recipe.with_(terms=terms, requests=requests, plan=plan))
        except (Unfit, Unstable):
            continue
