"""Hooks of the user on gradients: seen by the gradient, they are seen by what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import (  # type: ignore[attr-defined]
    GGNMP,
    HMP,
    BatchDiagGGNExact,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
)
from tests.cases import Net, classification
from tests.faults.hook_places import ELSEWHERE, PLACES, on_output
from tests.faults.problems import KINDS, check, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


def double(grad: Tensor) -> Tensor:
    """Changes the gradient."""
    return 2 * grad


def clip(grad: Tensor) -> Tensor:
    """Changes some entries."""
    return grad.clamp(-0.01, 0.01)


def observe(grad: Tensor) -> None:
    """Looks at the gradient."""
    assert torch.isfinite(grad).all()


def give_back(grad: Tensor) -> Tensor:
    """Returns what it was given."""
    return grad


@pytest.mark.parametrize("hook", [double, clip])
@pytest.mark.parametrize("place", [*PLACES, *ELSEWHERE])
def test_gradients_follow_a_change(place: str, hook: Any) -> None:
    """They sum to the gradient, whoever came first."""
    make = (PLACES | ELSEWHERE)[place]
    check(classification(make(hook), (3,)), "gradients")


CURVATURE: dict[str, Callable[[], Any]] = {
    "exact": DiagGGNExact,
    "columns": lambda: DiagGGNExact(chunk_size=1),
    "sampled": DiagGGNMC,
    "samples": BatchDiagGGNExact,
    "products": GGNMP,
    "Hessian": HMP,
}


@pytest.mark.parametrize("extension", CURVATURE)
@pytest.mark.parametrize("place", PLACES)
def test_curvature_refuses_a_change(place: str, extension: str) -> None:
    """There is no such thing as the curvature of a gradient that somebody bent."""
    problem = classification(PLACES[place](double), (3,))
    with pytest.raises(UnsupportedError, match=r"[Hh]ook"):
        problem.run(CURVATURE[extension]())


@pytest.mark.parametrize("place", PLACES)
def test_curvature_refuses_a_change_of_some_entries(place: str) -> None:
    problem = classification(PLACES[place](clip), (3,))
    with pytest.raises(UnsupportedError, match=r"[Hh]ook"):
        problem.run(DiagGGNExact())


@pytest.mark.parametrize("place", ["output", "model_output", "forward_hook"])
def test_the_hook_is_named(place: str) -> None:
    problem = classification(PLACES[place](double), (3,))
    with pytest.raises(UnsupportedError, match="double"):
        problem.run(DiagGGNExact())


@pytest.mark.parametrize("place", ["forward_hook", "first_forward_hook", "activation"])
def test_hessian_refuses_a_change(place: str) -> None:
    problem = classification(PLACES[place](double), (3,))
    with pytest.raises(UnsupportedError, match=r"[Hh]ook"):
        problem.run(DiagHessian())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", [observe, give_back])
@pytest.mark.parametrize("place", [*PLACES, *ELSEWHERE])
def test_hooks_that_change_nothing(place: str, hook: Any, kind: str) -> None:
    make = (PLACES | ELSEWHERE)[place]
    check(classification(make(hook), (3,)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_retained_gradients(kind: str) -> None:
    kept = []

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden.retain_grad()
        kept.append(hidden)
        return net.last(torch.tanh(hidden))  # type: ignore[no-any-return]

    net = Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))
    problem = classification(net, (3,))
    expectation = expect(problem.expected, kind)
    kept.clear()
    problem.run(*expectation.extensions)
    expectation.compare(problem.parameters)
    assert kept[0].grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_hook_of_a_hidden_layer_that_was_removed(kind: str) -> None:
    """It is gone before the backward pass."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden.register_hook(double).remove()
        return net.last(torch.tanh(hidden))  # type: ignore[no-any-return]

    net = Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))
    check(classification(net, (3,)), kind)


def test_gradients_follow_a_hook_of_the_loss() -> None:
    problem = classification(on_output(observe), (3,))
    expectation = expect(problem.expected, "gradients")
    loss = problem.loss()
    loss.register_hook(lambda g: g / 2)
    with backpack(*expectation.extensions):
        loss.backward()
    halves = {"batch_l2": 0.25, "sum_grad_squared": 0.25}
    expectation.fields.pop("grad_clipped")
    for field, values in expectation.fields.items():
        expectation.fields[field] = [halves.get(field, 0.5) * value for value in values]
    expectation.compare(problem.parameters)


def test_hooks_before_and_after_the_library() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.inner(net.first(x))
        hidden.register_hook(clip)
        return net.last(torch.tanh(hidden))  # type: ignore[no-any-return]

    def inside(net: Any, x: Tensor) -> Tensor:
        hidden = x * net.w
        hidden.register_hook(double)
        return hidden  # type: ignore[no-any-return]

    inner = Net(inside, w=nn.Parameter(torch.randn(4)))
    net = Net(forward, first=nn.Linear(3, 4), inner=inner, last=nn.Linear(4, 3))
    check(classification(net, (3,)), "gradients")


@pytest.mark.parametrize("hook", [double, clip])
@pytest.mark.parametrize("place", ELSEWHERE)
def test_curvature_refuses_a_change_elsewhere(place: str, hook: Any) -> None:
    problem = classification(ELSEWHERE[place](hook), (3,))
    with pytest.raises(UnsupportedError, match=r"[Hh]ook"):
        problem.run(DiagGGNExact())
