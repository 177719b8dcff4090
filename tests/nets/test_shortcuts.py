"""Every quick way gives what the plain one does, on random nets, and is really taken there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from backpack_core import Extension, backpack
from backpack_core.errors import BackpackError
from backpack_core.extensions import (
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_products import Columns
from backpack_secondorder import propagators
from tests.nets.draw import draw
from tests.nets.losses import LOSSES
from tests.nets.passes import Run
from tests.nets.recipe import Plan
from tests.nets.shortcuts import SHORTCUTS, alone, counted, placed, plain, together
from tests.nets.truth import difference
from tests.nets.verdict import Prepared

RTOL = 1e-7
# Fields that may hold other things, where a product has lost its factors.
FORMS = ("kflr factors.0", "kfac factors.0", "kflr factors.1", "kfac factors.1")
BLOCKS = 5
PASSED_BY = "calls passed by"
# In parts of the largest value of a field in all parameters.
NOISE = 1e-9
Values = Mapping[tuple[str, str], Tensor]


def _first(random: Random) -> list[Extension]:
    bound = random.choice([0.05, 0.5])
    kinds: list[Extension] = [BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance()]
    kinds += [BatchDotGrad(), ClippedSumGrad(bound, normaliser=None)]
    return random.sample(kinds, random.randint(1, 4))


def _curvature(random: Random) -> list[Extension]:
    size = random.choice([None, None, 1, 3])
    exact: list[Extension] = [kind(chunk_size=size) for kind in (DiagGGNExact, BatchDiagGGNExact)]
    exact += [KFLR(chunk_size=size, fail_mode="diagonal")]
    if random.random() < 0.2:
        exact += [SqrtGGNExact(chunk_size=size)]
    return [*random.sample(exact, random.randint(1, len(exact))), *_sampled(random)]


def _sampled(random: Random) -> list[Extension]:
    kinds: list[Extension] = [DiagGGNMC(4), KFAC(4, fail_mode="diagonal")]
    return random.sample(kinds, random.randint(0, 2))


def _asked(prepared: Prepared, random: Random) -> list[Extension]:
    """Extensions that a net has values for."""
    kinds = [LOSSES[term.kind] for term in prepared.recipe.terms]
    names = {term.kind for term in prepared.recipe.terms}
    if "functional" in names or not all(kind.has_curvature for kind in kinds):
        return _first(random)
    if any(r.name in ("DiagHessian", "HMP") for r in prepared.recipe.requests):
        return [DiagHessian(), *random.choice([[], _curvature(random)])]
    return random.choice([_first(random), _curvature(random), _curvature(random)])


def _tensors(value: Any) -> Mapping[str, Tensor]:
    if isinstance(value, Tensor):
        return {"": value}
    return value.tensors() if hasattr(value, "tensors") else {}


def _values(prepared: Prepared, extensions: list[Extension], gradient: str) -> Values:
    """What one pass stores, by parameter and field.

    Gradients are shared in passes only that do not compare them, of which the third is the first.
    """
    recipe = prepared.recipe.with_(plan=Plan())
    run = Run(recipe, prepared.net, prepared.losses, prepared.truth.parameters)
    for _ in range(3 if gradient == "shared" else 1):
        run.net.zero_grad()
        loss = run.loss()
        torch.manual_seed(0)
        with backpack(*extensions, gradient=gradient, check="never"):  # type: ignore[arg-type]
            loss.backward()
    found = {}
    for name, parameter in run.net.named_parameters():
        own = vars(parameter)
        if (root := own.get("sqrt_ggn_exact")) is not None:  # its columns are in some order
            own["sqrt_ggn_exact"] = torch.einsum("vni,vnj->nij", root.flatten(2), root.flatten(2))
        for field in ("grad", *(extension.savefield for extension in extensions)):
            for part, tensor in _tensors(getattr(parameter, field, None)).items():
                found[name, f"{field} {part}".rstrip()] = tensor.detach()
    run.forget()
    return found


def _outcome(prepared: Prepared, extensions: list[Extension], gradient: str) -> Values | str:
    """The values; of an error of the library, its class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _values(prepared, extensions, gradient)
        except BackpackError as error:
            return type(error).__name__


def _fault(
    quick: Values | str, slow: Values | str, gradient: str, least: Mapping[str, float]
) -> str:
    """How the outcomes of two ways differ; empty if they do not."""
    if isinstance(quick, str) or isinstance(slow, str):
        return "" if quick == slow else f"{quick if isinstance(quick, str) else slow}, one of both"
    largest = {**least}
    for (_, field), value in slow.items():
        size = value.nan_to_num().abs().max().item() if value.numel() else 0.0
        largest[field] = max(largest.get(field, 0.0), size)
    for (name, field), value in slow.items():
        if field == "grad" and gradient in ("none", "skipped"):
            continue
        own = quick.get((name, field))
        if field in FORMS and _form(quick, name, field) != _form(slow, name, field):
            continue  # a block or a diagonal where the plain way has no factors
        if field in FORMS and value.numel() == slow[name, f"{field[:-1]}0"].numel() == 1:
            continue  # kept apart, two uses of one number count as one and its transpose
        if own is None or own.shape != value.shape:
            return f"{field} of {name} is missing, or of another shape"
        undefined = value.isnan()  # the root of a negative loss, in passes that are not measured
        if not undefined.equal(own.isnan()):
            return f"{field} of {name} is undefined in one way only"
        own, value = own.masked_fill(undefined, 0.0), value.masked_fill(undefined, 0.0)
        if not difference(own, value, NOISE / RTOL * largest[field] + 1e-9) < RTOL:
            return f"{field} of {name} differs by {difference(own, value, 1e-9):.1e}"
    return ""


def _form(values: Values, name: str, field: str) -> list[torch.Size]:
    """The shapes of the factors of a parameter."""
    parts = [key for key in FORMS if key.split()[0] == field.split()[0]]
    return [values[name, key].shape for key in parts if (name, key) in values]


def _compared(prepared: Prepared, extensions: list[Extension], random: Random) -> list[str]:
    """What is wrong with shortcuts on one net: all together, one alone, and one for gradients."""
    with placed(plain()):
        slow = _outcome(prepared, extensions, "autograd")
    least = {"variance": RTOL / NOISE * prepared.truth.scale**2}  # squares cancel in it

    def fault(name: str) -> str:
        gradient = SHORTCUTS[name].gradient if name else "autograd"
        with placed(alone(name) if name else together()):
            quick = _outcome(prepared, extensions, gradient)
        if name in ("", PASSED_BY) and slow == "UnsupportedError" and not isinstance(quick, str):
            return ""  # a rule that is not asked does not refuse; test_nets judges the values
        found = _fault(quick, slow, gradient, least)
        asked = ", ".join(type(extension).__name__ for extension in extensions)
        return f"{name or 'together'}: {found}\n{asked}\n{prepared.recipe}\n" if found else ""

    of_gradients = [name for name, shortcut in SHORTCUTS.items() if not shortcut.off]
    names = ["", random.choice(sorted(SHORTCUTS)), random.choice(of_gradients)]
    faults = [*filter(None, map(fault, names))]
    return [*filter(None, map(fault, SHORTCUTS))] or faults if faults else []


def _net(seed: int) -> tuple[Prepared, list[Extension]]:
    prepared = draw(seed)
    return prepared, _asked(prepared, Random(seed))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_shortcuts_against_the_plain_way(block: int, request: pytest.FixtureRequest) -> None:
    first, nets = request.config.getoption("--seed"), request.config.getoption("--nets")
    faults: list[str] = []
    for seed in range(first + block, first + max(block + 1, nets // 3), BLOCKS):
        faults += _compared(*_net(seed), Random(seed))
    assert not faults, "\n".join(faults[:5])


@pytest.mark.parametrize("seed", [910035, 910350])
def test_found(seed: int) -> None:
    """Columns that reach some uses only, without common factors; the root of a negative loss."""
    assert not _compared(*_net(seed), Random(seed))


@pytest.mark.parametrize("name", [n for n, shortcut in SHORTCUTS.items() if shortcut.taken])
def test_a_shortcut_is_taken_where_it_is_on_alone(name: str) -> None:
    shortcut = SHORTCUTS[name]
    for seed in range(400):
        net = _net(seed)
        with placed(alone(name)), counted(shortcut.taken) as taken:
            _outcome(*net, shortcut.gradient)
        if taken[0]:
            break
    assert taken[0]
    with placed(shortcut.off), counted(shortcut.taken) as taken:
        _outcome(*net, "autograd")
    assert not (shortcut.off and taken[0])


def test_a_wrong_shortcut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Condensed columns that are a little too long."""
    original = propagators.condensed

    def wrong(columns: Columns) -> Columns:
        return original(columns).map(lambda mat: 1.01 * mat)

    monkeypatch.setattr(propagators, "condensed", wrong)
    for seed in range(400):
        faults = _compared(*_net(seed), Random(seed))
        if faults:
            break
    assert faults[0].startswith("condensed columns")
