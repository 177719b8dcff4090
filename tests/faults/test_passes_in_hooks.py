"""A pass after one that failed, with its error still at hand, and autograd called in a hook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack
from backpack_core.contract.extension import Extension
from backpack_core.errors import BackpackError, UnsupportedError
from backpack_core.extensions import (
    GGNMP,
    KFLR,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
    SumGradSquared,
)
from tests.cases import Net, Problem, classification, mlp
from tests.faults.problems import KINDS, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


def test_a_pass_that_failed_and_is_still_held_by_its_error() -> None:
    """Of two parameters that functions use, autograd does not get to the second one."""
    net = Net(
        lambda net, x: (x[:, None] * (net.a + net.b)).sum(2),
        a=nn.Parameter(torch.randn(3, 2)), b=nn.Parameter(torch.randn(3, 2)),
    )  # fmt: skip
    problem = Problem(net, (torch.randn(4, 2),), nn.CrossEntropyLoss(), torch.randint(3, (4,)))
    try:
        problem.run(KFLR())
    except BackpackError:  # the traceback of which holds the pass, as the frame holds the error
        problem.run(KFLR(fail_mode="block"))
    assert [p.kflr.structure for p in problem.parameters] == ["block", "block"]  # type: ignore[attr-defined]


def _with_a_hook(problem: Problem, hook: Callable[[], None]) -> Tensor:
    """The loss, with a hook on an activation that calls a function once."""
    todo = [hook]

    def call(_: Tensor) -> None:
        if todo:
            todo.pop()()

    def on_output(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(call)

    model: Any = problem.model
    handle = model[0].register_forward_hook(on_output)
    loss = problem.loss()
    handle.remove()
    return loss


def _stop() -> None:
    raise InterruptedError


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_on_an_activation_that_fails_once(kind: str) -> None:
    """The next pass over the same graph visits every module once, and a plain one none."""
    problem = classification(mlp(), (3,))
    expectation = expect(problem.expected, kind)
    for later in (True, False):
        loss = _with_a_hook(problem, _stop)
        with pytest.raises(InterruptedError), backpack(*expectation.extensions):
            loss.backward(retain_graph=True)
        problem.model.zero_grad()
        for parameter in problem.parameters:
            parameter.__dict__.clear()
        with backpack(*expectation.extensions) if later else nullcontext():
            loss.backward(retain_graph=True)
        if later:
            expectation.compare(problem.parameters)
        assert later or not any(vars(p) for p in problem.parameters)


@pytest.mark.parametrize(
    "block", [None, backpack, partial(backpack, SumGradSquared(savefield="of_inner"))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_by_the_same_graph_in_a_hook_on_an_activation(kind: str, block: Any) -> None:
    """That of a multiple of the loss, under a block of its own or none."""
    problem = classification(mlp(), (3,))
    expectation = expect(problem.expected, kind)

    def run() -> None:
        with nullcontext() if block is None else block():
            torch.autograd.grad(doubled, problem.parameters, retain_graph=True)

    loss = _with_a_hook(problem, run)
    doubled = 2 * loss
    with backpack(*expectation.extensions):
        loss.backward(retain_graph=True)
    expectation.compare(problem.parameters)


def _implicit(net: Net, x: Tensor) -> Tensor:
    """``z = tanh(0.1 W z + x)``; a hook solves for the gradient behind it."""
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(20):
            z = torch.tanh(0.1 * net.inner(z) + x)
    z = torch.tanh(0.1 * net.inner(z) + x)
    start = z.detach().requires_grad_()
    step = torch.tanh(0.1 * net.inner(start) + x)

    def solve(grad: Tensor) -> Tensor:
        found = grad
        for _ in range(20):
            (pulled,) = torch.autograd.grad(step, start, found, retain_graph=True)
            found = grad + pulled
        return found

    z.register_hook(solve)
    return net.last(z)


@pytest.mark.parametrize("extension", [DiagGGNExact, KFLR, DiagHessian])
def test_curvature_of_an_implicit_layer(extension: type[Extension]) -> None:
    net = Net(_implicit, inner=nn.Linear(3, 3), last=nn.Linear(3, 2))
    problem = Problem(net, (torch.randn(4, 3),), nn.CrossEntropyLoss(), torch.randint(2, (4,)))
    problem.run(BatchGrad())
    with pytest.raises(UnsupportedError, match="does not go through a hook"):
        problem.run(extension())  # type: ignore[call-arg]


class Adjoint(torch.autograd.Function):
    """One step of a solver; its backward runs the module again, as adjoint methods do."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.field = field
        ctx.save_for_backward(y, *parameters)
        return y + 0.1 * field(y)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            step = y + 0.1 * ctx.field(y)
            return (None, *torch.autograd.grad(step, [y, *parameters], grads))


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, KFLR, GGNMP])
def test_an_adjoint_solver(extension: type[Extension]) -> None:
    net = Net(
        lambda net, x: net.last(Adjoint.apply(net.inner, net.first(x), *net.inner.parameters())),
        first=nn.Linear(3, 3), inner=nn.Linear(3, 3), last=nn.Linear(3, 2),
    )  # fmt: skip
    problem = Problem(net, (torch.randn(4, 3),), nn.CrossEntropyLoss(), torch.randint(2, (4,)))
    with pytest.raises(UnsupportedError, match=r"\(odeint, not odeint_adjoint\)"):
        problem.run(extension())  # type: ignore[call-arg]
