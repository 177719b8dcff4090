"""Runs a recipe with the library, and judges what it gave."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backpack_core.errors import BackpackError, PluginCodeError
from tests.leftovers import left_behind, state
from tests.nets.losses import Losses
from tests.nets.net import build, data, generator
from tests.nets.passes import CHANGING, WITH_OTHER_DATA, Run
from tests.nets.quantities import QUANTITIES
from tests.nets.recipe import Recipe, Request
from tests.nets.scope import has_value, rewrites_aside
from tests.nets.truth import Truth, Unstable, difference, fresh

RTOL = 1e-8
# What is this much smaller than the largest entry of all parameters is rounding, and so is less.
NOISE = 1e-12
SMALLEST = 1e-6
# What needs the graph after the pass.
KEEPING = frozenset({"HMP", "GGNMP"})
# Passes that fail on the way, and one whose gradients have a graph, also those of inputs.
UNFREED = frozenset(
    {"after_failure", "after_failure_on_one_graph", "after_thawing", "differentiable"}
)


@dataclass(frozen=True)
class Verdict:
    """What became of a recipe.

    Attributes:
        outcome: ``"exact"``, ``"refused"`` (an error of the library), ``"wrong"`` or ``"crash"``.
        what: What it is about, without numbers and names: equal for equal causes, mostly.
        details: The message, or the difference.
    """

    outcome: str
    what: str = ""
    details: str = ""

    @property
    def passes(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.outcome in {"exact", "refused"}


class Prepared:
    """A recipe that plain autograd can run, with everything it should give.

    Attributes:
        recipe: The recipe.
        net: Its net, not extended.
        losses: Its losses, not extended.
        truth: What plain autograd gives.
        expected: What each request should store on each parameter; ``None`` where only an error
            is right.
        weights: Of a sum of all individual gradients, where it is to be differentiated.
        derivatives: What that should give.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Build it, run it, and compute what is expected.

        Raises:
            Unstable: Plain autograd cannot, or not reliably.
        """
        self.recipe = recipe
        if rewrites_aside(recipe):
            raise Unstable("What is overwritten aside may hold its own future for ever.")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.net = build(recipe)
                self.losses = Losses(recipe, self._shapes())
                self.truth = Truth(recipe, self.net, self.losses)
                if recipe.plan.passes in WITH_OTHER_DATA:
                    with torch.no_grad():  # a layout of memory may not fit another batch
                        self.net(*data(recipe, 1, 1))
                self.expected = {str(r): self._expected(r) for r in recipe.requests}
                self.weights = self._weights()
                self.derivatives = self.truth.derivative_of_gradients(self.weights)
        except Unstable:
            raise
        except Exception as error:
            raise Unstable(f"{type(error).__name__}: {error}") from error

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        torch.manual_seed(self.recipe.seed)
        with torch.no_grad():
            values = self.net(*fresh(data(self.recipe)))
        pairs = zip(self.net.results, values, strict=True)
        return {name: tuple(value.shape[1:]) for name, value in pairs}

    def _expected(self, request: Request) -> dict[str, Tensor] | None:
        quantity, found = QUANTITIES[request.name], {}
        if not has_value(quantity.family, quantity.is_sum, request.options, self.truth.traps):
            return None
        if request.options.get("normaliser") == "loss" and self.truth.normaliser is None:
            return None
        for name in self.truth.parameters:
            value = quantity.expected(self.truth, name, request.options).detach()
            if not bool(torch.isfinite(value).all()):
                raise Unstable(f"{request} of {name} is not finite.")
            found[name] = value
        largest = max(value.abs().max().item() for value in found.values() if value.numel())
        if quantity.family == "ggn" and self.truth.rounding > RTOL * max(largest, SMALLEST):
            raise Unstable(f"{request} is made of rounding errors.")
        return found

    def _weights(self) -> dict[str, Tensor]:
        is_asked = any(r.name == "BatchGrad" and not r.options for r in self.recipe.requests)
        if self.recipe.plan.passes != "differentiable" or not is_asked:
            return {}
        random = generator(self.recipe.seed, "weights")
        found = self.truth.individual_gradients.items()
        return {name: torch.randn(g.shape, generator=random) for name, g in found}


def judge(prepared: Prepared) -> Verdict:
    """Run everything at once; where that is refused, each request by itself as well."""
    requests = prepared.recipe.requests
    verdict = attempt(prepared, requests)
    if verdict.outcome == "refused" and len(requests) > 1:
        for request in requests:
            alone = attempt(prepared, (request,))
            if not alone.passes:
                return alone
    return verdict


def attempt(prepared: Prepared, requests: tuple[Request, ...]) -> Verdict:
    """One run with some of the requests; nothing may be left of it.

    After an error, or where a product keeps the graph, something may: the input of a module that
    was overwritten afterwards holds its own future until a backward pass frees it.
    """
    before = state()
    verdict = _attempt(prepared, requests)
    keeps = prepared.recipe.plan.passes in UNFREED or any(r.name in KEEPING for r in requests)
    left = left_behind(before) if verdict.outcome == "exact" and not keeps else {}
    if left:
        return Verdict("wrong", f"left behind: {', '.join(left)}", str(left))
    return verdict


def _attempt(prepared: Prepared, requests: tuple[Request, ...]) -> Verdict:
    fields: dict[str, str] = {}
    run = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = Run(prepared.recipe, prepared.net, prepared.losses, prepared.truth.parameters)
            extensions = []
            for request in requests:
                quantity = QUANTITIES[request.name]
                extension = quantity.extension(request.name, request.options, prepared.truth)
                extensions.append(extension)
                fields[str(request)] = extension.savefield
            run.execute(extensions)
            fault = next(_faults(prepared, run, requests, fields), None)
        except PluginCodeError as error:  # something that the library does not know
            return Verdict("crash", _head(error.__cause__ or error), str(error))
        except BackpackError as error:
            after = _fault_after_error(prepared, run) if run is not None else None
            return after or Verdict("refused", _head(error), str(error))
        except Exception as error:
            return Verdict("crash", _head(error), traceback.format_exc())
        finally:
            if run is not None:
                run.forget()
    return fault or Verdict("exact")


def _fault_after_error(prepared: Prepared, run: Run) -> Verdict | None:
    """What an error left behind: a plain step must give the plain gradient."""
    if prepared.recipe.plan.passes in CHANGING:
        return None
    run.net.zero_grad()
    try:
        run.loss().backward()
    except Exception as error:
        return Verdict("crash", f"after an error, {_head(error)}", traceback.format_exc())
    return next(_faults_of_gradients(prepared, run, list(prepared.truth.parameters)), None)


def _head(error: BaseException) -> str:
    """Class and beginning of a message, without what differs from net to net."""
    text = re.sub(r"'[^']*'|\[[^\]]*\]|\d+(\.\d+)?(e-?\d+)?", "…", str(error).split("\n")[0])
    text = re.sub(r"^[A-Z]\w+(?= (…|has|is|needs|starts))", "Module", text)
    return f"{type(error).__name__}: {text[:90]}"


def _faults(
    prepared: Prepared, run: Run, requests: tuple[Request, ...], fields: Mapping[str, str]
) -> Iterator[Verdict]:
    yield from _faults_of_gradients(prepared, run, run.names)
    for request in requests:
        yield from _faults_of(prepared, run, request, fields[str(request)])
    for name, parameter in run.net.named_parameters():
        for field in fields.values():
            if name not in prepared.truth.parameters and _is_something(parameter, field):
                yield Verdict("wrong", f"{field} stray", f"{field} of {name} without a gradient")
    yield from _aliases(run, list(fields.values()))
    if "BatchGrad()" in fields:
        yield from _faults_of_derivatives(prepared, run)


def _faults_of_gradients(prepared: Prepared, run: Run, names: list[str]) -> Iterator[Verdict]:
    floor = NOISE / RTOL * prepared.truth.scale
    for name in names:
        text = _mismatch(run.used[name].grad, prepared.truth.gradients[name], floor)
        if text:
            yield Verdict("wrong", f".grad {text[0]}", f".grad of {name}: {text[1]}")


def _faults_of(prepared: Prepared, run: Run, request: Request, field: str) -> Iterator[Verdict]:
    quantity, expected = QUANTITIES[request.name], prepared.expected[str(request)]
    found, truth = run.used, prepared.truth
    if expected is None:
        trap = ", ".join(sorted(truth.traps))
        yield Verdict("wrong", f"{request.name} though {trap}", f"{request} has no value here")
        return
    largest = max(e.abs().max().item() if e.numel() else 0.0 for e in expected.values())
    for name in run.names:
        if not hasattr(found[name], field):
            yield Verdict("wrong", f"{request.name} missing", f"{request} of {name}: missing")
            continue
        floor = max(quantity.floor(truth, name, request.options), NOISE / RTOL * largest, SMALLEST)
        value = quantity.read(truth, name, getattr(found[name], field))
        text = _mismatch(value, expected[name], floor)
        if value.requires_grad and not run.creates_graph:
            text = "with a graph", "requires a gradient"
        if text:
            yield Verdict("wrong", f"{request.name} {text[0]}", f"{request} of {name}: {text[1]}")


def _faults_of_derivatives(prepared: Prepared, run: Run) -> Iterator[Verdict]:
    used: dict[str, Any] = {**run.used}
    parts = [(used[name].grad_batch * w).sum() for name, w in prepared.weights.items()]
    if not any(part.requires_grad for part in parts):
        return
    parameters = [run.used[name] for name in prepared.weights]
    found = torch.autograd.grad(sum(parts), parameters, allow_unused=True, materialize_grads=True)
    largest = max(d.abs().max().item() for d in prepared.derivatives.values())
    for name, ours in zip(prepared.weights, found, strict=True):
        text = _mismatch(ours, prepared.derivatives[name], max(SMALLEST, NOISE / RTOL * largest))
        if text:
            what = f"derivative of BatchGrad {text[0]}"
            yield Verdict("wrong", what, f"Derivative in {name}: {text[1]}")


def _mismatch(ours: Tensor | None, expected: Tensor, floor: float) -> tuple[str, str] | None:
    """What is wrong with a value: in a word, and with numbers."""
    if ours is None:
        return "missing", "missing"
    if ours.shape != expected.shape:
        return "shape", f"shape {list(ours.shape)}, expected {list(expected.shape)}"
    if not bool(torch.isfinite(ours).all()):
        return "not finite", "not finite"
    error = difference(ours.detach(), expected, floor)
    if error < RTOL:
        return None
    factors = (ours.detach() / expected).flatten()[:6].tolist()
    return "differs", f"relative error {error:.1e}, ours / expected: {factors}"


def _is_something(parameter: Tensor, field: str) -> bool:
    value: Any = getattr(parameter, field, None)
    if callable(value) and not isinstance(value, Tensor):
        value = value(torch.ones(1, *parameter.shape))
    return value is not None and bool((value != 0).any())


def _aliases(run: Run, fields: list[str]) -> Iterator[Verdict]:
    """Values that share memory with others of the same parameter."""
    for name in run.names:
        seen: dict[int, str] = {}
        for field in ["grad", *fields]:
            value = getattr(run.used[name], field, None)
            if not isinstance(value, Tensor) or not value.numel():
                continue
            other = seen.setdefault(value.untyped_storage().data_ptr(), field)
            if other != field:
                yield Verdict("wrong", "shared memory", f"{other} and {field} of {name}")
