"""The machinery itself: it draws everything, its oracle is right, and it finds what is wrong."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad
from backpack_products import SampleProduct
from tests import oracle
from tests.nets import quantities
from tests.nets.asked import draw_terms
from tests.nets.catalogue import KINDS
from tests.nets.draw import Draft, draw
from tests.nets.kinds import Kind, Unfit, no_settings
from tests.nets.recipe import Plan, Recipe, Request, Source, Step, Term
from tests.nets.report import Tally
from tests.nets.shrink import shrink
from tests.nets.truth import Unstable
from tests.nets.verdict import Prepared, Verdict, judge

MSE = Term("y", "MSE", {"reduction": "mean"})


def recipe(*steps: Step, batch: int = 3, **changes: Any) -> Recipe:
    """A recipe that ends in ``y``."""
    given = {"terms": (MSE,), "requests": (Request("BatchGrad"),), **changes}
    return Recipe(0, batch, {"x": Source((2, 3))}, steps, **given)


def linear(before: str, after: str, out: int = 3) -> Step:
    return Step("Linear", (before,), (after,), {"out": out, "bias": True}, f"to_{after}")


def test_every_kind_is_drawn() -> None:
    missing = set(KINDS)
    for seed in range(2000):
        draft = Draft(Random(seed), seed, is_tame=seed % 3 == 0)
        with suppress(Unfit):
            for _ in range(8):
                draft.draw_step()
            if draft.is_tame:
                draft.draw_trap()
            draw_terms(draft)
        missing -= {step.kind for step in draft.recipe.steps}
        if not missing:
            break
    assert not missing


def test_a_seed_gives_one_recipe() -> None:
    assert draw(5).recipe == draw(5).recipe
    assert str(draw(5).recipe) != str(draw(6).recipe)


def test_a_recipe_can_be_read_again() -> None:
    drawn = draw(7).recipe
    names = {c.__name__: c for c in (Recipe, Source, Step, Term, Request, Plan)}
    assert eval(repr(drawn), names) == drawn


@pytest.mark.parametrize("kind", ["Recurrent", "Attention", "Conv", "GroupNorm"])
def test_truth_agrees_with_the_oracle(kind: str) -> None:
    random = Random(0)
    settings = KINDS[kind].draw(random, ((2, 3),))
    if kind == "Recurrent":
        settings["take"] = "sequence"
    step = Step(kind, ("h",), ("y", "weights"), settings, "layer")
    prepared = Prepared(recipe(linear("x", "h"), step))
    net, losses, truth = prepared.net, prepared.losses, prepared.truth

    def forward(*inputs: Tensor) -> Tensor:
        result: Tensor = net(*inputs)[0]
        return result

    def loss(output: Tensor) -> Tensor:
        result: Tensor = losses({"y": output})
        return result

    names = list(truth.parameters)
    problem = (forward, loss, truth.inputs, [net.get_parameter(name) for name in names])
    gradients, diagonals = oracle.individual_gradients(*problem), oracle.ggn_diagonals(*problem)
    for name, gradient, diagonal in zip(names, gradients, diagonals, strict=True):
        oracle.assert_close(truth.individual_gradients[name], gradient)
        oracle.assert_close(truth.ggn_diagonal(name), diagonal)


def test_truth_of_second_derivatives() -> None:
    tanh = Step("Activation", ("h",), ("y",), {"name": "Tanh"}, "tanh")
    truth = Prepared(recipe(linear("x", "h"), tanh)).truth
    for name, parameter in truth.parameters.items():

        def loss(value: Tensor, name: str = name) -> Tensor:
            (output,) = functional_call(truth.net, {name: value}, tuple(truth.inputs))
            result: Tensor = truth.losses({"y": output})
            return result

        size = parameter.numel()
        hessian = torch.autograd.functional.hessian(loss, parameter.detach()).reshape(size, size)
        vector = torch.randn_like(parameter)
        ours = truth.hessian_product(name, vector).sum(0)
        oracle.assert_close(ours.flatten(), hessian @ vector.flatten())


def test_samples_that_influence_each_other_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that mixes samples and does not say so would make the oracle wrong."""
    kind = Kind("secret", lambda part, settings, x: x - x.mean(0), no_settings)
    monkeypatch.setitem(KINDS, "secret", kind)
    with pytest.raises(Unstable, match="single samples"):
        Prepared(recipe(linear("x", "h"), Step("secret", ("h",), ("y",))))


@pytest.mark.parametrize("batch", [1, 3])
def test_what_belongs_to_a_sample_does_not_exist_where_samples_mix(batch: int) -> None:
    requests = (Request("BatchGrad"), Request("DiagGGNExact"), Request("HMP"))
    mix = Step("mix", ("h",), ("y",), {"name": "norm"})
    prepared = Prepared(recipe(linear("x", "h"), mix, batch=batch, requests=requests))
    has_value = [prepared.expected[str(request)] is not None for request in requests]
    assert has_value == [batch == 1, True, True]
    assert prepared.truth.traps == (set() if batch == 1 else {"mixing"})


class Doubled(BatchGrad):
    """Wrong at one kind of module."""

    def read(self, product: SampleProduct) -> Any:
        factor = 2 if type(product.module).__name__ == "LayerNorm" else 1
        return factor * super().read(product)


class Crashing(BatchGrad):
    """Raises what the library does not know."""

    def read(self, product: SampleProduct) -> Any:
        raise ZeroDivisionError


class Refusing(BatchGrad):
    """Raises what the library knows."""

    def read(self, product: SampleProduct) -> Any:
        raise UnsupportedError("no")


class Short(BatchGrad):
    """Leaves a sample out."""

    def read(self, product: SampleProduct) -> Any:
        return super().read(product)[1:]


NORM = Step("LayerNorm", ("h",), ("z",), {"axes": 1, "affine": True, "bias": False}, "norm")
TANH = Step("elementwise", ("z",), ("t",), {"name": "tanh"})
LONG = recipe(linear("x", "h"), NORM, TANH, linear("t", "y"))


@pytest.mark.parametrize(
    ("kind", "outcome", "what"),
    [
        (BatchGrad, "exact", ""),
        (Doubled, "wrong", "BatchGrad differs"),
        (Short, "wrong", "BatchGrad shape"),
        (Crashing, "crash", "ZeroDivisionError: "),
        (Refusing, "refused", "UnsupportedError: no"),
    ],
)
def test_faults_are_told_apart(
    kind: type[BatchGrad], outcome: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantities, "extensions", SimpleNamespace(BatchGrad=kind))
    verdict = judge(Prepared(LONG))
    assert (verdict.outcome, verdict.what) == (outcome, what)


def test_a_fault_is_shrunk_to_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantities, "extensions", SimpleNamespace(BatchGrad=Doubled))
    prepared = Prepared(LONG)
    shrunk, verdict = shrink(prepared, judge(prepared))
    assert [step.kind for step in shrunk.recipe.steps] == ["LayerNorm"]
    assert verdict.what == "BatchGrad differs"


def test_bounds_of_refusals_count() -> None:
    counts = Tally()
    for seed, outcome in enumerate(["exact", "refused", "refused", "wrong"]):
        counts.add(seed, Verdict(outcome, "cause"), 1.0 + seed)
    whole = Tally()
    whole.merge(counts.as_data())
    whole.merge(counts.as_data())
    assert whole.refused == 0.5
    assert whole.causes["refused: cause"] == 4
    assert whole.slowest[0] == (4.0, 3)
    assert next(iter(whole.lines())) == "8: 4 refused, 2 exact, 2 wrong"
