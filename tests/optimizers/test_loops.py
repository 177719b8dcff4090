"""Loops in which passes are forgotten, and parameters come late or rest."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from backpack_capture import capture
from backpack_core import extend
from backpack_core.errors import UsageError
from backpack_optimizers import EKFAC, KFAC, GaussNewton
from tests.optimizers.problems import (
    assert_near,
    damped_product,
    factors,
    net,
    problem,
    solved,
    train,
    values,
)

EXACT: dict[str, Any] = {"mc_samples": None, "momentum": 0.0}
BOTH = pytest.mark.parametrize("kind", [KFAC, EKFAC])


def a_pass(optimizer: Any, model: nn.Module, lossfunc: Any, x: Any, y: Any) -> None:
    with optimizer.curvature():
        lossfunc(model(x), y).backward()


@BOTH
@pytest.mark.parametrize("to_none", [True, False])
def test_the_models_zero_grad_forgets_passes(kind: Any, to_none: bool) -> None:
    """A batch that was left out is in no average, and takes no share of the next gradient."""
    model, lossfunc, x, y = problem()
    twin = copy.deepcopy(model)
    optimizer, other = (kind(m, lr=0.1, **EXACT) for m in (model, twin))
    train(other, twin, lossfunc, x, y)
    a_pass(optimizer, model, lossfunc, 9 * x, y)
    model.zero_grad(to_none)
    if to_none:
        with pytest.raises(UsageError, match="no pass with a sample ran in a block"):
            optimizer.step()
    a_pass(optimizer, model, lossfunc, 9 * x, y)
    model.zero_grad(to_none)
    a_pass(optimizer, model, lossfunc, x, y)
    optimizer.step()
    assert_near(values(model), values(twin))


@BOTH
def test_a_step_inside_of_the_block_is_refused(kind: Any) -> None:
    """The gradient would be that of the last pass alone, and the factors those of the others."""
    model, lossfunc, x, y = problem()
    optimizer, before = kind(model, lr=0.1, **EXACT), values(model)
    a_pass(optimizer, model, lossfunc, x, y)
    with optimizer.curvature():
        lossfunc(model(x), y).backward()
        with pytest.raises(UsageError, match="step after the block"):
            optimizer.step()
    assert torch.equal(before, values(model))


def test_gradients_of_zero_are_a_step() -> None:
    """Also if they were clipped in place."""
    model, lossfunc = problem()[0], extend(nn.MSELoss())
    model.requires_grad_(False)
    model[3].requires_grad_(True)
    x = torch.randn(4, 4)
    y = model(x).detach()
    optimizer = KFAC(model, **EXACT)
    a_pass(optimizer, model, lossfunc, x, y)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    assert optimizer.steps == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_from_outside_of_blocks(reduction: str) -> None:
    """Those that are there before are added to the joined ones; in between, means raise."""
    model, lossfunc, x, y = problem("mlp", reduction)
    optimizer = KFAC(model, **EXACT)
    lossfunc(model(x), y).backward()
    whole = [p.grad.clone() for p in model.parameters()]

    def penalty() -> None:
        sum(p.square().sum() for p in model.parameters()).backward()

    model.zero_grad()
    penalty()
    a_pass(optimizer, model, lossfunc, x[:2], y[:2])
    a_pass(optimizer, model, lossfunc, x[2:], y[2:])
    for p, gradient in zip(model.parameters(), whole, strict=True):
        assert_near(p.grad, gradient + 2 * p.detach())
    optimizer.zero_grad()
    a_pass(optimizer, model, lossfunc, x[:2], y[:2])
    penalty()
    if reduction == "mean":
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(UsageError, match="Gradients were changed between two passes"):
            a_pass(optimizer, model, lossfunc, x[2:], y[2:])
        for p, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.grad, gradient)
        return
    a_pass(optimizer, model, lossfunc, x[2:], y[2:])
    for p, gradient in zip(model.parameters(), whole, strict=True):
        assert_near(p.grad, gradient + 2 * p.detach())


def test_a_first_pass_that_fails_leaves_no_gradient() -> None:
    model, lossfunc, x, y = problem()
    optimizer = KFAC(model)
    with suppress(ZeroDivisionError), optimizer.curvature():
        lossfunc(model(x), y).backward()
        raise ZeroDivisionError
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_that_comes_late_steps_by_its_own_factors() -> None:
    """At once, and its first factors have no past."""
    model, lossfunc, x, y = problem()
    late = model.get_parameter("0.weight")
    late.requires_grad_(False)
    optimizer = KFAC(model, model.parameters(), lr=0.1, damping=0.3, split="exact", **EXACT)
    train(optimizer, model, lossfunc, x, y, 2)
    late.requires_grad_(True)
    averages = []
    for _ in range(2):
        new, *_ = factors(model, lossfunc, x, y)
        averages.append(new)
        step = solved(damped_product(averages[0], 0.3, "exact"), late.grad)
        wanted = late.detach() - 0.1 * step
        train(optimizer, model, lossfunc, x, y)
        assert_near(late.detach(), wanted)
    for found, one, two in zip(optimizer._averages[late], *averages, strict=True):
        assert_near(found, 0.5 * (one + two))
    assert optimizer.without_factors == []
    state = copy.deepcopy(optimizer.state_dict())
    other = KFAC(model, lr=0.1, damping=0.3, split="exact", **EXACT)
    other.load_state_dict(state)
    assert [other._counts[p] for p in model.parameters()] == [2, 4, 4, 4, 4, 4]


def test_the_first_corrected_values_of_a_late_parameter_replace_those_of_factors() -> None:
    found = []
    for waits in (0, 3):
        model, lossfunc, x, y = problem()
        late = model.get_parameter("0.weight")
        optimizer = EKFAC(model, model.parameters(), lr=0.0, **EXACT)
        late.requires_grad_(False)
        train(optimizer, model, lossfunc, x, y, waits)
        late.requires_grad_(True)
        train(optimizer, model, lossfunc, x, y, 2)
        found.append(optimizer._bases[late].dense())
    assert_near(*found)


@BOTH
def test_a_method_that_changes_with_captured_steps(kind: Any) -> None:
    found = []
    for is_captured in (False, True):
        model, lossfunc, x, y = problem()
        optimizer = kind(model, lr=0.1, method="adam", **EXACT)
        step = capture(lambda x, y, m=model: lossfunc(m(x), y), lossfunc, optimizer)  # noqa: B023
        for number in range(14):
            optimizer.param_groups[0]["method"] = "adam" if number < 8 else "curvature"
            optimizer.zero_grad()
            if is_captured:
                step(x, y)
            else:
                a_pass(optimizer, model, lossfunc, x, y)
            optimizer.step()
        found.append(values(model))
    assert_near(*found)


@BOTH
def test_a_step_that_cannot_invert_changes_nothing(kind: Any, monkeypatch: Any) -> None:
    """And may be tried again."""
    model, lossfunc, x, y = problem()
    twin = copy.deepcopy(model)
    optimizer, other = (kind(m, lr=0.1, inverses_every=2, **EXACT) for m in (model, twin))
    for one, net_of in ((optimizer, model), (other, twin)):
        train(one, net_of, lossfunc, x, y, 2)
    optimizer.zero_grad()
    a_pass(optimizer, model, lossfunc, 2 * x, y)

    def fails(averages: Any) -> None:
        raise UsageError("A factor is singular.")

    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_invert", fails)
        with pytest.raises(UsageError, match="is singular"):
            optimizer.step()
    optimizer.step()
    train(other, twin, lossfunc, 2 * x, y)
    assert_near(values(model), values(twin))


@pytest.mark.parametrize("kind", [KFAC, EKFAC, GaussNewton])
def test_copies_and_pickles(kind: Any) -> None:
    model, lossfunc, *_ = problem()
    optimizer = kind(model, lossfunc) if kind is GaussNewton else kind(model)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copied(optimizer)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_parameters_that_the_model_has_exchanged(kind: Any) -> None:
    model, x, y = net()
    model, lossfunc = extend(model), extend(nn.CrossEntropyLoss())
    optimizer = kind(model)

    def step() -> None:
        optimizer.zero_grad()
        with optimizer.curvature():
            lossfunc(model(x), y).backward()
        optimizer.step()

    step()
    taken = model[3]
    model[3] = nn.Identity()
    step()  # of the others
    model[3] = taken
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(UsageError, match="no longer the model's"):
        step()


def test_frozen_parameters_rest_in_gauss_newton() -> None:
    """They do not decay by old gradients, either; and some parameter must be left."""
    model, x, y = net()
    optimizer = GaussNewton(model, nn.CrossEntropyLoss(), weight_decay=0.1)
    optimizer.step([(x, y)])
    model[0].requires_grad_(False)
    frozen, rest = values(model[0]), values(model[3])
    optimizer.step([(x, y)])
    assert torch.equal(values(model[0]), frozen)
    assert not torch.equal(values(model[3]), rest)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="No trained parameter has method"):
        optimizer.step([(x, y)])


def test_weights_do_not_decay_if_no_step_makes_the_loss_fall() -> None:
    model, x, y = net()
    before = values(model)
    optimizer = GaussNewton(
        model, nn.CrossEntropyLoss(), lr=1e5, damping=1e-6, weight_decay=1e-7, halvings=1
    )
    optimizer.step([(x, y)])
    assert torch.equal(values(model), before)
